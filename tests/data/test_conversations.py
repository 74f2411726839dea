"""Conversations from files and data sets: any of three spellings, and one bad row never ends a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_exp.data.sources import HubConversations, hub_conversations, jsonl_conversations
from dspark_exp.errors import DataError

_GOOD = [
    {"turns": ["one", "two"]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "domain": "chat"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "reasoning": "r"}]},
]
_BAD = {
    "not a JSON object": [1],
    "no turns: expected a key conversations, messages or turns": {"messages": []},
    "a turn of role tool, which is not supported": {"messages": [{"role": "tool", "content": "{}"}]},
    "a turn of role ['user'], which is not supported": {"messages": [{"role": ["user"], "content": "hi"}]},
    "turns that are not a list": {"turns": "one"},
    "a turn whose content is not text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "finished is neither true nor false": {"turns": ["one"], "finished": "no"},
}


def _write(path: Path, rows: list, torn: str = "") -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n" + torn)
    return str(path)


def test_three_spellings_are_read_and_bad_rows_counted_by_reason(tmp_path: Path) -> None:
    loaded = jsonl_conversations(_write(tmp_path / "rows.jsonl", [*_GOOD, *_BAD.values()], '{"turns": ["to'))
    assert loaded.dropped == dict.fromkeys(_BAD, 1) | {"not JSON": 1}
    multi, kept, thought = loaded.conversations
    assert [m["content"] for m in multi.messages] == ["one", "two"]
    assert not multi.has_reply
    assert kept.has_reply
    assert kept.domain == "chat"
    assert [m["role"] for m in kept.prompts.messages] == ["user"]
    assert thought.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "r"}


def test_text_parts_are_joined_and_a_line_that_is_no_utf8_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    path.write_bytes("\ufeff".encode() + json.dumps(parts).encode() + b'\n{"turns": ["\xff\xfe"]}\n')
    loaded = jsonl_conversations(str(path))
    assert [c.messages for c in loaded.conversations] == [({"role": "user", "content": "ab"},)]
    assert loaded.dropped == {"not JSON": 1}


def test_a_file_without_any_conversation_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no conversation: 1 x not a JSON object"):
        jsonl_conversations(_write(tmp_path / "rows.jsonl", [[1]]))
    with pytest.raises(DataError, match="it is empty"):
        jsonl_conversations(_write(tmp_path / "none.jsonl", []))


@pytest.mark.parametrize("streaming", [True, False])
def test_any_data_set_is_read_through_datasets(tmp_path: Path, streaming: bool, monkeypatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [
        {"conversations": [{"from": "human", "value": f"q{i}"}], "source": "meta-math/MetaMathQA" if i % 2 else "other"}
        for i in range(20)
    ]
    _write(folder / "train.jsonl", rows)
    source = HubConversations(str(folder), streaming=streaming)
    loaded = hub_conversations(source, {"math": ["metamath"]}, 8)
    assert len(loaded.conversations) == 8
    assert loaded == hub_conversations(source, {"math": ["metamath"]}, 8)
    everything = hub_conversations(source, {"math": ["metamath"]}, None).conversations
    assert sorted(item.domain for item in everything) == ["all"] * 10 + ["math"] * 10
    assert [c.messages[0]["content"] for c in everything] != [f"q{i}" for i in range(20)]  # shuffled


def test_a_data_set_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*could not be loaded"):
        hub_conversations(HubConversations(str(tmp_path / "nowhere")), {}, 3)
