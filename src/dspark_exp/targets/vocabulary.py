"""The vocabulary facts of a target, read and checked in one place.

In: a model and its tokenizer. Out: sizes and the ids that mean something. Padded rows of embedding and LM head, past
the tokenizer's ids, are never drafted; the mask id may be one of them, because it is only ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_exp.errors import ConfigError, TargetError

_PROBE = "0123456789"


@dataclass(frozen=True)
class VocabSpec:
    """Sizes in tokens or rows. ``stop_ids``: union of tokenizer, generation config, config and the template's turn end.

    Raises:
        TargetError: LM head and embedding disagree, or no end token is declared anywhere.
        ConfigError: the mask id is out of range or already means something else.
    """

    tokenizer_size: int
    embedding_rows: int
    head_rows: int
    mask_id: int
    pad_id: int
    stop_ids: tuple[int, ...]
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if self.embedding_rows != self.head_rows:
            raise TargetError(
                f"The target's embedding has {self.embedding_rows} rows, its LM head {self.head_rows}; drafters need "
                "one vocabulary for both."
            )
        if not self.stop_ids:
            raise TargetError("The target declares no end token in its tokenizer, generation config, config, template.")
        meanings = {self.pad_id: "pad", self.bos_id: "beginning-of-text"} | dict.fromkeys(self.stop_ids, "end")
        if not 0 <= self.mask_id < self.embedding_rows:
            raise ConfigError(
                f"target.mask_token_id={self.mask_id} must be one of the target's {self.embedding_rows} embedding rows."
            )
        if self.mask_id in meanings:
            raise ConfigError(
                f"target.mask_token_id={self.mask_id} is the target's {meanings[self.mask_id]} token; choose an id "
                "that text never uses."
            )

    @property
    def num_usable(self) -> int:
        """Ids below this are text; rows from here on are padding."""
        return min(self.tokenizer_size, self.head_rows)


def read_vocabulary(model: Any, tokenizer: Any, mask_token_id: int | None) -> VocabSpec:
    """Sizes and ids; a mask id that is not given is the tokenizer's, else a row that text never uses."""
    rows = model.get_input_embeddings().weight.shape[0]
    stop_ids = stop_ids_of(tokenizer, model.config, model.generation_config)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stop_ids), 0)
    mask = mask_token_id if mask_token_id is not None else tokenizer.mask_token_id
    if mask is None:
        mask = _unused_token_id(tokenizer, rows, {*stop_ids, pad, tokenizer.bos_token_id})
    return VocabSpec(
        tokenizer_size=len(tokenizer),
        embedding_rows=rows,
        head_rows=model.get_output_embeddings().weight.shape[0],
        mask_id=int(mask),
        pad_id=int(pad),
        stop_ids=stop_ids,
        bos_id=tokenizer.bos_token_id,
    )


def turn_end_id(tokenizer: Any) -> int | None:
    """The special token that the chat template puts after a reply, or None where turns end without one."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tail = tokenizer(text[text.rindex(_PROBE) + len(_PROBE) :], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return next((int(token) for token in tail if token in special), None)


def _unused_token_id(tokenizer: Any, rows: int, busy: set[int | None]) -> int:
    """A row the text never uses: one past the tokenizer where the embedding is padded, else a reserved special."""
    if len(tokenizer) < rows:
        return len(tokenizer)
    spare = [i for i in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder) if i not in busy and i < rows]
    if not spare:
        raise ConfigError("This tokenizer has no unused token for the mask; give one with target.mask_token_id=<id>.")
    return max(spare)


def stop_ids_of(tokenizer: Any, config: Any, generation_config: Any) -> tuple[int, ...]:
    """End tokens: the union of what the tokenizer, both configs and the chat template's turn end say."""
    found: set[int] = set()
    declared = (
        tokenizer.eos_token_id,
        getattr(generation_config, "eos_token_id", None),
        config.get_text_config(decoder=True).eos_token_id,
        turn_end_id(tokenizer),
    )
    for source in declared:
        found.update([source] if isinstance(source, int) else source or [])
    return tuple(sorted(found))
