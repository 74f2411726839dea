"""The HTTP front, as a client types it: a real server in a thread, `requests` on the other side."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import requests

from dspark_exp.data.completion_server import CompletionServer, ServerSettings
from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.targets import Target
from tests.conftest import make_cache, make_drafter
from tests.serving.conftest import Server

MESSAGES = [{"role": "user", "content": "add 3 and 4"}]


def _post(server: Server, path: str, body: Any, **options: Any) -> requests.Response:
    return requests.post(f"{server.url}/{path}", json=body, timeout=60, **options)


def _stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, its end checked."""
    with _post(server, path, body | {"stream": True}, stream=True) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.decode().removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_completion_is_what_the_loop_decodes(server: Server, tiny: Target) -> None:
    answer = _post(server, "chat/completions", {"messages": MESSAGES, "seed": 7, "max_tokens": 10}).json()
    ids = render_prompt(tiny.tokenizer, MESSAGES)
    loop = SpeculativeLoop(tiny, make_drafter("dspark_markov", tiny), make_cache, Sampling(1.0))
    (wanted,) = loop.run([Request(ids, 10, 7)])
    choice = answer["choices"][0]
    assert choice["token_ids"] == wanted.token_ids
    assert choice["message"]["content"] == tiny.tokenizer.decode(wanted.token_ids, skip_special_tokens=True)
    assert choice["finish_reason"] == wanted.finish_reason
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == len(wanted.token_ids)
    assert answer["dspark"]["rounds"] == len(wanted.rounds)


def test_streaming_gives_the_same_text_in_parts(server: Server) -> None:
    body = {"prompt": "one two three", "seed": 3, "max_tokens": 12, "ignore_eos": True}
    whole = _post(server, "completions", body).json()["choices"][0]["text"]
    events = _stream(server, "completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole  # every chunk has its choice
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert events[-1]["dspark"]["rounds"] >= 1
    *events, usage = _stream(server, "completions", body | {"stream_options": {"include_usage": True}})
    assert all(event["choices"] for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12


def test_a_streamed_chat_names_its_role_once(server: Server) -> None:
    events = _stream(server, "chat/completions", {"messages": MESSAGES, "seed": 3, "ignore_eos": True})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    parts = [{"role": "user", "content": [{"type": "text", "text": "add 3 "}, {"type": "text", "text": "and 4"}]}]
    answer = _post(server, "chat/completions", {"messages": parts, "seed": 3, "ignore_eos": True}).json()
    assert answer["choices"][0]["message"]["content"].startswith("".join(delta["content"] for delta in deltas))


def test_a_stop_text_ends_the_answer_before_itself(server: Server) -> None:
    body = {"prompt": "one two three", "seed": 3, "max_tokens": 60, "ignore_eos": True}
    whole = _post(server, "completions", body).json()["choices"][0]
    stop = whole["text"][len(whole["text"]) // 2 :][:5]  # over several tokens
    wanted = whole["text"][: whole["text"].index(stop)]
    finished, tokens = server.engine.counts["finished"], len(whole["token_ids"])
    answer = _post(server, "completions", body | {"stop": ["§", stop]}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
    assert choice["token_ids"] == whole["token_ids"][: len(choice["token_ids"])]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) < tokens
    events = _stream(server, "completions", body | {"stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == wanted
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert server.engine.counts["finished"] == finished + 2
    begins = whole["text"][-3:] + "§"  # a stop text that begins at the end but never comes holds nothing back
    events = _stream(server, "completions", body | {"stop": begins})
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]


def test_neutral_values_of_what_is_not_offered_are_accepted(server: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "n": 1, "presence_penalty": 0.0, "logprobs": None, "echo": False}
    more = {"stop": None, "response_format": {"type": "text"}, "temperature": 1, "return_token_ids": True}
    assert _post(server, "completions", body | more).status_code == 200


def test_our_own_client_of_such_servers_reads_replies_from_this_one(server: Server, tiny: Target) -> None:
    settings = ServerSettings(server.url)
    client = CompletionServer(settings, {"temperature": 1.0}, 12, tiny.tokenizer, tiny.facts.stop_ids, turn_end=1)
    ids = render_prompt(tiny.tokenizer, MESSAGES)
    replies: dict[int, Any] = {}
    client.generate([(7, ids)], lambda position, reply: replies.update({position: reply}))
    loop = SpeculativeLoop(tiny, make_drafter("dspark_markov", tiny), make_cache, Sampling(1.0))
    wanted = loop.run([Request(ids, 12, 7)])[0]
    content = [token for token in wanted.token_ids if token not in tiny.facts.stop_ids]
    assert replies[0].token_ids[: len(content)] == content
    assert replies[0].finish_reason == wanted.finish_reason
    assert client.num_retokenized == 0


def test_token_ids_are_a_prompt_too(server: Server, tiny: Target) -> None:
    ids = tiny.tokenizer.encode("one two")
    by_text = _post(server, "completions", {"prompt": "one two", "seed": 1}).json()
    by_ids = _post(server, "completions", {"prompt": ids, "seed": 1}).json()
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": ""}, "empty"),
        ("completions", {"prompt": 3}, "text or a list of token ids"),
        ("completions", {"prompt": [5, 10**6]}, "Token ids must lie"),
        ("completions", {"prompt": "hi", "max_tokens": 10**4}, "positions"),
        ("completions", {"prompt": "hi", "max_tokens": "many"}, "whole number"),
        ("completions", {"prompt": "hi", "max_tokens": 0}, "expected at least 1"),
        ("completions", {"prompt": "hi", "seed": 2**80}, "2^63"),
        ("completions", {"prompt": "hi", "seed": "one"}, "whole number"),
        ("completions", {"prompt": "hi", "stream": "no"}, "true or false"),
        ("completions", {"prompt": "hi", "stream_options": 1}, "include_usage"),
        ("completions", {"prompt": "hi", "stop": [""]}, "none of them empty"),
        ("completions", {"prompt": "hi", "stream": True, "return_token_ids": True}, "whole answers"),
        ("completions", {"prompt": "hi", "temperature": "warm"}, "a number"),
        ("completions", {"prompt": "hi", "guided_regex": "a+"}, "Not offered: guided_regex"),
        ("completions", {"prompt": "hi", "temperature": 0.3}, "samples with temperature=1.0"),
        ("completions", {"prompt": "hi", "logprobs": 3}, "Not offered: logprobs=3"),
        ("completions", {"prompt": "hi", "n": 2}, "Not offered: n=2"),
        ("chat/completions", {"messages": []}, "messages must be"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages must be"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ("chat/completions", [1], "JSON object"),
    ],
)
def test_bad_requests_get_a_json_error(server: Server, path: str, body: Any, message: str) -> None:
    reply = _post(server, path, body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_broken_json_and_unknown_paths(server: Server) -> None:
    reply = requests.post(f"{server.url}/completions", data=b"{no json", timeout=10)
    assert reply.status_code == 400
    missing = requests.get(f"{server.url}/nothing", timeout=10)
    assert missing.status_code == 404
    assert "/v1/nothing" in missing.json()["error"]["message"]
    assert requests.get(f"{server.url}/completions", timeout=10).status_code == 405


def test_models_metrics_and_health(server: Server) -> None:
    _post(server, "completions", {"prompt": "hi"})
    assert requests.get(f"{server.url}/models", timeout=10).json()["data"][0]["id"] == "tiny"
    metrics = requests.get(f"{server.root}/metrics", timeout=10).text
    values = dict(line.split() for line in metrics.splitlines() if not line.startswith("#"))
    assert int(values["dspark_finished_total"]) >= 1
    assert int(values["dspark_tokens_total"]) >= 1
    assert int(values["dspark_accepted_tokens_total"]) <= int(values["dspark_verified_tokens_total"])
    assert float(values["dspark_time_to_first_token_seconds_sum"]) > 0
    assert values["dspark_time_to_first_token_seconds_count"] == values["dspark_answers_total"]
    assert requests.get(f"{server.root}/health", timeout=10).json() == {"status": "ok"}


def test_a_full_queue_gets_429(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tiny, rows=1, max_queue=1)
    held = threading.Event()
    original = server.engine._batch.round

    def slow() -> None:
        held.wait(10)
        original()

    monkeypatch.setattr(server.engine._batch, "round", slow)
    threads = []
    statuses: list[int] = []
    for seed in range(6):
        body = {"prompt": "hi", "seed": seed, "max_tokens": 2}
        threads.append(
            threading.Thread(target=lambda b=body: statuses.append(_post(server, "completions", b).status_code))
        )
        threads[-1].start()
        time.sleep(0.05)
    held.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    server.close()


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_row(tiny: Target, streams: bool) -> None:
    """Also where tokens come all the time."""
    server = Server(tiny, rows=1)
    body = {"prompt": "hi", "max_tokens": 120, "ignore_eos": True, "stream": streams}
    original = server.engine._batch.round

    def slow() -> None:
        time.sleep(0.05)
        original()

    server.engine._batch.round = slow  # type: ignore[method-assign]
    if streams:
        reply = _post(server, "completions", body, stream=True)
        next(reply.iter_lines())
        reply.close()
    else:
        with pytest.raises(requests.Timeout):
            requests.post(f"{server.url}/completions", json=body, timeout=0.3)
    deadline = time.time() + 10
    while server.engine.num_running and time.time() < deadline:
        time.sleep(0.02)
    assert server.engine.num_running == 0
    assert server.engine.counts["cancelled"] == 1
    assert _post(server, "completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
    server.close()


def test_many_open_requests_do_not_hold_up_one_that_ends(tiny: Target) -> None:
    """More than a pool of threads could wait for."""
    server = Server(tiny, rows=40, max_queue=64)
    original = server.engine._batch.round

    def slow() -> None:
        time.sleep(0.05)
        original()

    server.engine._batch.round = slow  # type: ignore[method-assign]
    body = {"prompt": "hi", "max_tokens": 120, "ignore_eos": True}
    threads = [threading.Thread(target=_post, args=(server, "completions", body)) for _ in range(36)]
    for thread in threads:
        thread.start()
    while server.engine.num_running < len(threads):
        time.sleep(0.01)
    assert _post(server, "completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200
    assert server.engine.counts["finished"] == 1
    for thread in threads:
        thread.join()
    server.close()
