"""Where training conversations come from: the synthetic language, JSONL files, or any data set of the hub.

In: names, files, counts. Out: conversations, and the rows that could not be read, counted by reason. One bad row
never ends a job. Knows nothing about tokenizers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspark_exp.data import language
from dspark_exp.data.rendering import Message
from dspark_exp.errors import DataError

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip
_SHUFFLE_SEED, _SHUFFLE_BUFFER = 42, 10_000


@dataclass(frozen=True)
class Conversation:
    """A conversation for training; without an assistant turn it is prompts, whose replies the target generates."""

    messages: tuple[Message, ...]
    domain: str = "all"
    source: str = ""
    finished: bool = True

    @property
    def has_reply(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)

    @property
    def prompts(self) -> Conversation:
        """The same without its replies."""
        kept = tuple(message for message in self.messages if message["role"] != "assistant")
        return Conversation(kept, self.domain, self.source)


@dataclass(frozen=True)
class Loaded:
    """Conversations of a source and how many of its rows were no conversation, by reason."""

    conversations: list[Conversation]
    dropped: dict[str, int]


@dataclass(frozen=True)
class HubConversations:
    """A data set on the hub (or a local folder): id, split, optional configuration; ``streaming`` downloads lazily."""

    id: str
    split: str = "train"
    config: str | None = None
    streaming: bool = True


def language_conversations(split: str, num_per_benchmark: int) -> list[Conversation]:
    """Prompts of the synthetic language to regenerate from, balanced over its nine benchmarks."""
    return [
        Conversation(({"role": "user", "content": item.prompt},), item.domain, item.benchmark)
        for item in language.samples(split, num_per_benchmark)
    ]


def jsonl_conversations(path: str, max_rows: int | None = None) -> Loaded:
    """Rows with ``conversations`` or ``messages`` (replies kept) or ``turns`` (prompts to regenerate from).

    Raises:
        DataError: the file is missing, or none of its rows is a conversation.
    """
    return _loaded(islice(read_jsonl(Path(path)), max_rows), f"data.path={path}", {})


def hub_conversations(source: HubConversations, domains: Mapping[str, Sequence[str]], max_rows: int | None) -> Loaded:
    """The first ``max_rows`` rows after a shuffle with a fixed seed.

    Args:
        domains: domain -> fragments of the row's ``source`` field that belong to it.

    Raises:
        DataError: the data set cannot be had, or none of its rows is a conversation.
    """
    from datasets import load_dataset  # slow import, needed on this path alone

    try:
        rows = load_dataset(source.id, source.config, split=source.split, streaming=source.streaming)
        buffer = {"buffer_size": _SHUFFLE_BUFFER} if source.streaming else {}
        picked = list(islice(rows.shuffle(seed=_SHUFFLE_SEED, **buffer), max_rows))
    except Exception as error:  # the hub client raises many kinds; all mean that the data cannot be had
        raise DataError(
            f"Data set {source.id} ({source.split}) could not be loaded: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''} Use data=jsonl data.path=<file> for local rows."
        ) from error
    return _loaded(picked, f"data set {source.id}", domains)


def read_jsonl(path: Path) -> Iterator[Any]:
    """Parsed lines; a line that is not JSON comes out as the ``ValueError`` that says why.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}. Give an existing JSONL file.") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:  # no JSON, or no UTF-8
                    yield ValueError(f"line {number}: {error}")


def _loaded(rows: Iterable[Any], where: str, domains: Mapping[str, Sequence[str]]) -> Loaded:
    found: list[Conversation] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        try:
            found.append(_conversation(row, domains))
        except DataError as error:
            dropped[str(error)] += 1
    if not found:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.items()) or "it is empty"
        raise DataError(f"{where} holds no conversation: {reasons}.")
    return Loaded(found, dict(dropped))


def _conversation(row: Any, domains: Mapping[str, Sequence[str]]) -> Conversation:
    if isinstance(row, ValueError):
        raise DataError("not JSON")
    if not isinstance(row, dict):
        raise DataError("not a JSON object")
    replied, prompts = row.get("conversations") or row.get("messages"), row.get("turns")
    turns = replied or prompts
    if not turns:
        raise DataError("no turns: expected a key conversations, messages or turns")
    if not isinstance(turns, list):
        raise DataError("turns that are not a list")
    messages = tuple(_message(turn if replied else {"role": "user", "content": turn}) for turn in turns)
    source, finished = str(row.get("source") or ""), row.get("finished", True)
    if not isinstance(finished, bool):
        raise DataError("finished is neither true nor false")
    return Conversation(messages, _domain(row, source, domains), source, finished)


def _message(turn: Any) -> Message:
    role = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"a turn of role {role}, which is not supported")
    message = {"role": _ROLES[role], "content": _text(turn.get("content") or turn.get("value"))}
    reasoning = _text(turn.get("reasoning_content") or turn.get("reasoning"))
    return message | {"reasoning_content": reasoning} if reasoning else message


def _text(content: Any) -> str:
    """A text, or the joined texts of a list of text parts."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise DataError("a turn whose content is not text")
    return "".join(map(str, texts))


def _domain(row: Mapping[str, Any], source: str, domains: Mapping[str, Sequence[str]]) -> str:
    if "domain" in row:
        return str(row["domain"])
    return next((name for name, parts in domains.items() if any(p.lower() in source.lower() for p in parts)), "all")
