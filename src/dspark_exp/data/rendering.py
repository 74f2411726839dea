"""Chat rendering with supervision by token id: the one function for regeneration, features, training, evaluation.

In: a tokenizer with a chat template and messages. Out: token ids and which of them a drafter may learn.
Knows nothing about models. Spans are found by rendering growing prefixes, so no template is special.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def render_prompt(tokenizer: Any, messages: Sequence[Message], thinking: bool = False) -> list[int]:
    """Token ids up to and including the assistant header, as the target sees them before it answers."""
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, add_generation_prompt=True, return_dict=True, enable_thinking=thinking
    )
    return list(encoded["input_ids"])


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    stop_ids: Collection[int],
    *,
    finished: bool = True,
    thinking: bool = False,
    domain: str = "all",
    source: str = "",
) -> Row:
    """Render a conversation and mark the tokens of every assistant turn, its turn end included.

    ``finished=False`` says that the last reply was cut: its turn end was never produced, so it is removed.

    Raises:
        DataError: no user turn, no assistant reply, an empty reply, or a template that re-renders the reply's prefix.
    """
    _check_roles(messages)
    full = list(
        tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, enable_thinking=thinking)[
            "input_ids"
        ]
    )
    supervised = [False] * len(full)
    prompt_length, last_end = 0, 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = render_prompt(tokenizer, messages[:turn], thinking)
        if full[: len(prefix)] != prefix:
            continue  # the template rewrites this turn later (e.g. drops its reasoning): not what the target saw
        end = next((i for i in range(len(prefix), len(full)) if full[i] in stop_ids), len(full) - 1)
        is_cut = turn == len(messages) - 1 and not finished
        last_end = end if is_cut else end + 1
        supervised[len(prefix) : last_end] = [True] * (last_end - len(prefix))
        prompt_length = prompt_length or len(prefix)
    if not any(supervised):
        raise DataError("the chat template leaves no assistant token to supervise")
    return Row(full[:last_end], supervised[:last_end], domain, source, finished, prompt_length)


def _check_roles(messages: Sequence[Message]) -> None:
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
