"""OpenAI's own client library against this server: what it parses, what it raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dspark_exp.targets import Target
from tests.serving.conftest import Server

openai = pytest.importorskip("openai", reason="the client library is in the dev extra")
MESSAGES = [{"role": "user", "content": "add 3 and 4"}]
OPTIONS = {"model": "tiny", "seed": 3, "max_tokens": 24}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **OPTIONS)
    text = whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **OPTIONS))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_completion_ends_at_a_stop_text(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="one two", extra_body={"ignore_eos": True}, **OPTIONS).choices[0].text
    stop = text[4:7]
    ended = client.completions.create(prompt="one two", stop=stop, extra_body={"ignore_eos": True}, **OPTIONS)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this server samples with temperature"):
        client.chat.completions.create(messages=MESSAGES, temperature=0.2, **OPTIONS)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="hi")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_leaving_a_stream_frees_its_row(tiny: Target) -> None:
    server = Server(tiny, rows=1)
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="hi", max_tokens=140, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        after = client.completions.create(model="tiny", prompt="hi", max_tokens=2)
    assert after.usage.completion_tokens == 2
    assert server.engine.num_running == 0
    server.close()
