"""Conversations -> token rows ready for training, with every dropped row counted by its reason.

In: conversations and a tokenizer. Out: rows and a report. Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from dspark_exp.data.rendering import Row, render_conversation
from dspark_exp.data.sources import Conversation
from dspark_exp.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Rows of one split and what was dropped on the way, by reason."""

    rows: list[Row]
    dropped: dict[str, int]

    def digest(self) -> str:
        """Hash of every token and supervision mark."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(np.asarray(row.input_ids, dtype=np.int32).tobytes())
            digest.update(np.asarray(row.supervised, dtype=np.uint8).tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """Counts for results.json and the log."""
        return {
            "rows": len(self.rows),
            "tokens": self.num_tokens,
            "supervised_tokens": sum(sum(row.supervised) for row in self.rows),
            "rows_by_domain": dict(Counter(row.domain for row in self.rows)),
            "dropped": self.dropped,
            "sha256": self.digest(),
        }


def tokenize(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    stop_ids: Collection[int],
    max_length: int,
    thinking: bool = False,
    already_dropped: Mapping[str, int] = MappingProxyType({}),
    max_dropped: float = 1.0,
) -> Corpus:
    """Render every conversation; rows that cannot train anything are dropped and counted."""
    rows: list[Row] = []
    dropped: Counter[str] = Counter(already_dropped)
    for item in conversations:
        try:
            rendered = render_conversation(
                tokenizer,
                item.messages,
                stop_ids,
                finished=item.finished,
                thinking=thinking,
                domain=item.domain,
                source=item.source,
            )
        except DataError as error:
            dropped[str(error)] += 1
            continue
        for row in rendered:
            keep_row(row, max_length, rows, dropped)
    return checked(rows, dropped, max_dropped)


def keep_row(row: Row, max_length: int, rows: list[Row], dropped: Counter[str]) -> None:
    """Append a row cut to ``max_length``, or count why not."""
    ids, supervised = row.input_ids[:max_length], row.supervised[:max_length]
    if not any(a and b for a, b in pairwise(supervised)):
        cut = len(row.input_ids) > max_length and any(row.supervised)
        dropped["longer than data.max_length before any anchor" if cut else "too short for an anchor"] += 1
        return
    rows.append(Row(ids, supervised, row.domain, row.source, row.finished, row.prompt_length))


def checked(rows: list[Row], dropped: Counter[str], max_dropped: float = 1.0) -> Corpus:
    """A corpus that can train.

    Raises:
        DataError: nothing is left, more than the share ``max_dropped`` was dropped, or every token is supervised
            (a template that marks users too).
    """
    reasons = ", ".join(f"{count} x {reason}" for reason, count in dropped.most_common()) or "the data set is empty"
    if not rows:
        raise DataError(f"No row is left to train on: {reasons}.")
    share = dropped.total() / (dropped.total() + len(rows))
    if share > max_dropped:
        raise DataError(
            f"{share:.0%} of the rows were dropped ({reasons}); data.max_dropped allows {max_dropped:.0%}. "
            "Look at them with task=inspect_data."
        )
    if all(all(row.supervised) for row in rows):
        raise DataError("Every token of every row is supervised, prompts included; check the chat template.")
    return Corpus(rows, dict(dropped))


def split_validation(
    conversations: Sequence[Conversation], num_validation: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Hold out ``num_validation`` conversations, spread evenly over domains; the rest trains, shuffled."""
    order = list(range(len(conversations)))
    random.Random(seed).shuffle(order)
    domains = sorted({item.domain for item in conversations})
    held: set[int] = set()
    for position, domain in enumerate(domains):
        quota = num_validation // len(domains) + (position < num_validation % len(domains))
        held.update([i for i in order if conversations[i].domain == domain][:quota])
    train = [conversations[index] for index in order if index not in held]
    return train, [item for index, item in enumerate(conversations) if index in held]
