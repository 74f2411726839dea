"""Requests, their generations, and the record of every round.

Knows nothing about models. The end rules live here: tokens after an accepted end token do not exist, and the token
limit is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``seed`` alone decides its random numbers; ``ignore_stop`` goes on to the limit."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    ignore_stop: bool = False


@dataclass(frozen=True)
class Round:
    """One draft + one verification. ``emitted`` counts tokens that really left, the target's own included.

    ``confidence`` and, where it is recorded, ``overlap`` (the analytic acceptance rate, Eq. 8) are by drafted position.
    """

    drafted: int
    verified: int
    accepted: int
    emitted: int
    confidence: tuple[float, ...] = ()
    overlap: tuple[float, ...] = ()


@dataclass
class Generation:
    """What a request produced. The first token comes from the prefill and belongs to no round."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: Literal["stop", "length", ""] = ""


def positions_needed(request: Request, block_size: int) -> int:
    """Positions of a row that a request may fill: prompt, new tokens, and one block with its anchor more."""
    return len(request.prompt_ids) + request.max_new_tokens + block_size + 1


def shared_prefills(prompts: Mapping[int, list[int]]) -> dict[int, int]:
    """For each key, that of the prompt whose prefill holds its own: one that it begins or equals, else itself.

    Sorted, a prompt that begins any other begins the next one.
    """
    order = sorted(prompts, key=lambda key: (prompts[key], -key))
    source_of = {key: key for key in prompts}
    for key, following in zip(order[-2::-1], order[:0:-1], strict=True):
        if prompts[following][: len(prompts[key])] == prompts[key]:
            source_of[key] = source_of[following]
    return source_of


class Progress:
    """A request in flight: its generator, its tokens, its end."""

    def __init__(self, index: int, request: Request, stop_ids: frozenset[int]) -> None:
        self.index, self.request, self._stop_ids = index, request, stop_ids
        self.generation = Generation()
        self.length = 0  # positions whose keys are final: everything before the anchor
        self._generator = torch.Generator().manual_seed(request.seed)

    @property
    def anchor_id(self) -> int:
        return self.generation.token_ids[-1]

    @property
    def done(self) -> bool:
        return self.generation.finish_reason != ""

    def uniforms(self, count: int) -> torch.Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def emit(self, tokens: list[int]) -> int:
        """Append tokens up to the end token and the limit; returns how many really left."""
        emitted = 0
        for token in tokens:
            self.generation.token_ids.append(token)
            emitted += 1
            if token in self._stop_ids and not self.request.ignore_stop:
                self.generation.finish_reason = "stop"
                break
            if len(self.generation.token_ids) >= self.request.max_new_tokens:
                self.generation.finish_reason = "length"
                break
        return emitted
