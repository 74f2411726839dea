"""Chat rendering with supervision by token id: the one function for regeneration, features, training, evaluation.

In: a tokenizer with a chat template and messages. Out: token ids and which of them a drafter may learn.
Knows nothing about models. A turn is what the target saw and what it produced; turns of one conversation share a row
as long as each prompt continues what came before, so no template is special.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_exp.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One training sequence. ``supervised[i]`` means token i was produced by the target (its turn end included)."""

    input_ids: list[int]
    supervised: list[bool]
    domain: str = "all"
    source: str = ""
    finished: bool = True
    prompt_length: int = field(default=0)

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.supervised):
            raise DataError(f"A row has {len(self.input_ids)} tokens but {len(self.supervised)} supervision marks.")


@dataclass(frozen=True)
class Turn:
    """What the target saw and what it answered, as token ids. ``finished``: the answer ends with an end token."""

    prompt_ids: list[int]
    reply_ids: list[int]
    finished: bool = True


def render_prompt(tokenizer: Any, messages: Sequence[Message], thinking: bool = False) -> list[int]:
    """Token ids up to and including the assistant header, as the target sees them before it answers."""
    return _render(tokenizer, messages, thinking, add_generation_prompt=True)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    stop_ids: Collection[int],
    *,
    finished: bool = True,
    thinking: bool = False,
    domain: str = "all",
    source: str = "",
) -> list[Row]:
    """Render a conversation whose replies are given as text.

    ``finished=False`` says that the last reply was cut: its turn end was never produced, so it is not part of it.

    Raises:
        DataError: no user turn, no assistant reply, an empty reply, or turns that do not alternate.
    """
    check_roles(messages)
    turns = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            is_cut = index == len(messages) - 1 and not finished
            prompt = render_prompt(tokenizer, messages[:index], thinking)
            reply = _reply_ids(tokenizer, messages[: index + 1], prompt, stop_ids, thinking)
            turns.append(Turn(prompt, reply[:-1] if is_cut else reply, not is_cut))
    return rows_of_turns(turns, domain, source)


def rows_of_turns(turns: Iterable[Turn], domain: str = "all", source: str = "") -> list[Row]:
    """Rows in which every reply follows exactly the prompt that the target saw.

    A turn whose prompt continues the row so far joins it; a template that rewrites earlier turns (for instance drops
    their reasoning) makes it a row of its own.
    """
    rows: list[Row] = []
    ids: list[int] = []
    for turn in turns:
        if ids and turn.prompt_ids[: len(ids)] == ids:
            last = rows.pop()
            marks = last.supervised + [False] * (len(turn.prompt_ids) - len(ids))
            prompt_length = last.prompt_length
        else:
            marks, prompt_length = [False] * len(turn.prompt_ids), len(turn.prompt_ids)
        ids = [*turn.prompt_ids, *turn.reply_ids]
        marks = marks + [True] * len(turn.reply_ids)
        rows.append(Row(ids, marks, domain, source, turn.finished, prompt_length))
    return rows


def check_roles(messages: Sequence[Message]) -> None:
    """Refuse what cannot be a training conversation.

    Raises:
        DataError: with the reason under which the row is counted.
    """
    roles = [message.get("role") for message in messages]
    if "user" not in roles:
        raise DataError("no user turn")
    if "assistant" not in roles:
        raise DataError("no assistant reply")
    if any(message["role"] == "assistant" and not (message.get("content") or "").strip() for message in messages):
        raise DataError("empty assistant reply")
    turns = [role for role in roles if role != "system"]
    expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    if turns != expected:
        raise DataError("turns do not alternate between user and assistant")


def _render(tokenizer: Any, messages: Sequence[Message], thinking: bool, add_generation_prompt: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        list(messages),
        tokenize=True,
        add_generation_prompt=add_generation_prompt,
        return_dict=True,
        enable_thinking=thinking,
    )
    return list(encoded["input_ids"])


def _reply_ids(
    tokenizer: Any, messages: Sequence[Message], prompt: list[int], stop_ids: Collection[int], thinking: bool
) -> list[int]:
    """Ids of the last message up to its turn end, as they follow ``prompt``."""
    full = _render(tokenizer, messages, thinking, add_generation_prompt=False)
    ends = [index for index, token in enumerate(full) if token in stop_ids and index >= len(prompt)]
    if full[: len(prompt)] == prompt and ends:
        return full[len(prompt) : ends[0] + 1]
    # the template renders this turn otherwise than it prompts for it (e.g. its header differs): take the text itself
    stop = next((token for token in reversed(full) if token in stop_ids), None)
    if stop is None:
        raise DataError("the chat template ends no assistant turn with an end token")
    return [*tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"], stop]
