"""Replies by the target itself: turn by turn, safe against a crash, never mixed with other settings."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from dspark_exp.config import validated
from dspark_exp.data.completion_server import Reply
from dspark_exp.data.rendering import render_prompt
from dspark_exp.data.sources import Conversation
from dspark_exp.errors import DataError
from dspark_exp.targets import Target
from dspark_exp.tasks import regenerate as recipe
from dspark_exp.tasks.prepare_data import corpus_of
from dspark_exp.tasks.regenerate import regenerate
from tests.conftest import composed
from tests.data.test_completion_server import FakeServer

MANIFEST = {"revision": "a", "sampling": {"temperature": 1.0}}


def _user(*texts: str) -> Conversation:
    return Conversation(tuple({"role": "user", "content": text} for text in texts), "chat", "test")


CONVERSATIONS = [_user("thank you", "and again"), _user("sum 3 and 4")]


@pytest.fixture
def config():
    return validated(composed("data.max_new_tokens=12", "data.regenerate_batch_size=4"))


def test_later_turns_follow_what_the_target_really_said(config, tiny: Target, tmp_path: Path) -> None:
    rows, dropped = regenerate(config, tiny, CONVERSATIONS, tmp_path / "r.jsonl", MANIFEST)
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    by_turn = {(r["index"], r["turn"]): r for r in records}
    assert not dropped
    first = by_turn[0, 0]
    if first["finish_reason"] == "stop":
        said = tiny.tokenizer.decode(first["response_ids"][:-1])
        messages = [*CONVERSATIONS[0].messages[:1], {"role": "assistant", "content": said}]
        wanted = render_prompt(tiny.tokenizer, [*messages, CONVERSATIONS[0].messages[1]])
        assert by_turn[0, 1]["prompt_ids"] == wanted
    for row in rows:
        for record in records:
            ids = record["prompt_ids"] + record["response_ids"]
            if row.input_ids[: len(ids)] == ids:
                span = row.supervised[len(record["prompt_ids"]) : len(ids)]
                assert span == [True] * len(record["response_ids"])


@pytest.mark.parametrize("torn", [b'{"index": 1, "tu', b""])
def test_a_crash_loses_only_the_line_that_was_being_written(config, tiny, tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "r.jsonl"
    whole, _ = regenerate(config, tiny, CONVERSATIONS, path, MANIFEST)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + torn)
    again, _ = regenerate(config, tiny, CONVERSATIONS, path, MANIFEST)
    assert again == whole
    assert sorted(path.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())


def test_going_on_with_other_settings_is_refused_by_name(config, tiny: Target, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    regenerate(config, tiny, CONVERSATIONS[1:], path, MANIFEST)
    kept = path.read_bytes()
    with pytest.raises(DataError, match=r"revision was 'a', now 'b'; sampling was .*1\.0.*0\.5"):
        regenerate(config, tiny, CONVERSATIONS[1:], path, {"revision": "b", "sampling": {"temperature": 0.5}})
    assert path.read_bytes() == kept


def test_cut_empty_and_refused_replies_are_what_they_are(config, tiny, tmp_path: Path, monkeypatch) -> None:
    end = tiny.facts.stop_ids[0]
    answers = {
        0: Reply([70, 71], "length"),
        1: Reply([end], "stop"),
        2: Reply([], "refused"),
        3: Reply([72, end], "stop"),
    }

    def generate(prompts, on_reply) -> None:
        for position, (seed, _ids) in enumerate(prompts):
            on_reply(position, answers[seed])

    monkeypatch.setattr(recipe, "_generator", lambda *_: generate)
    items = [_user("a", "never asked, because the first reply was cut"), _user("b"), _user("c"), _user("d")]
    rows, dropped = regenerate(config, tiny, items, tmp_path / "r.jsonl", MANIFEST)
    assert dropped == {"empty reply": 1, "the server refused it": 1}
    cut, whole = rows
    assert (cut.finished, cut.input_ids[-1]) == (False, 71)  # no end token is learned that was never produced
    assert (whole.finished, whole.input_ids[-1]) == (True, end)


def test_a_server_may_answer_instead_of_the_target(tiny: Target, tmp_path: Path) -> None:
    fake = FakeServer()
    threading.Thread(target=fake.serve_forever, daemon=True).start()
    try:
        settings = validated(composed(f"data.server={fake.url}", "data.max_new_tokens=12"))
        rows, dropped = regenerate(settings, tiny, CONVERSATIONS, tmp_path / "r.jsonl", MANIFEST)
    finally:
        fake.shutdown()
        fake.server_close()
    assert not dropped
    prompts = [body["prompt"] for body in fake.bodies]
    assert render_prompt(tiny.tokenizer, CONVERSATIONS[1].messages) in prompts  # our rendering, as token ids
    assert len(prompts) == 3  # two turns of the first conversation, one of the second
    assert {body["temperature"] for body in fake.bodies} == {1.0}
    assert [row.input_ids[-1] for row in rows] == [tiny.facts.stop_ids[0]] * 2


def test_replies_that_are_there_are_kept_and_only_missing_ones_generated(config, tiny: Target, tmp_path: Path) -> None:
    config.paths.cache = str(tmp_path)
    config.data.max_dropped = 1.0
    reply = {"role": "assistant", "content": "7 is the answer"}
    given = [Conversation((*_user(text).messages, reply), "math") for text in ("sum 3 and 4", "sum 2 and 5")]
    mixed = [given[0], *CONVERSATIONS, given[1]]
    corpus, origin = corpus_of(config, tiny, mixed, {"not JSON": 2})
    kept = corpus_of(config, tiny, given, {})[0]
    made, made_origin = corpus_of(config, tiny, CONVERSATIONS, {})
    assert corpus.rows == kept.rows + made.rows
    assert corpus.dropped["not JSON"] == 2
    assert origin["replies"] == "given 2, others regenerated"
    assert origin["prompts_sha256"] == made_origin["prompts_sha256"]  # the same file of replies serves both
