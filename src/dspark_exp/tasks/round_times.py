"""What whole rounds of the engine take: drafting, verification and host, by requests and verification length.

In: a target, a drafter, a prompt for every request. Out: mean seconds of a round. Turns can lie between other work, so
that they meet the same machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_exp.calibration import identity
from dspark_exp.decoding import DecodingBatch, Request, Sampling
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import build_batch, load_benchmarks
from dspark_exp.tasks.evaluate import requests_of


class EveryRound:
    """A policy that drafts every round and verifies ``length`` tokens on average; ``length`` < 0 does not draft.

    Lengths differ from request to request where they can, as they do under a scheduler.
    """

    remembers = False

    def __init__(self, length: int) -> None:
        self.length = length

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Fits every drafter."""

    def start(self) -> None:
        """Nothing is remembered."""

    def observe(self, confidence_RG: np.ndarray | None, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing is remembered."""

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        """As a scheduler does."""
        return True

    def num_drafting(self, num_requests: int) -> int:
        return num_requests if self.length >= 0 else 0

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        lengths = np.full(num_requests, self.length)
        if 0 < self.length < block_size:
            pairs = num_requests // 2
            lengths[: 2 * pairs] += np.tile([-1, 1], pairs)
        return lengths


class RoundTimer:
    """Times rounds of one request a prompt by verification length; -1 does not draft.

    Lengths take turns, so that a slow minute of the machine hits all of them; every turn begins with the requests anew.
    """

    def __init__(
        self, target: Target, drafter: Any, sampling: Sampling, prompts: Sequence[list[int]], lengths: Sequence[int]
    ) -> None:
        self._policy, self._prompts, self._lengths = EveryRound(0), prompts, lengths
        self._new_tokens = (len(lengths) + 2) * (drafter.block_size + 1)
        longest = max(map(len, prompts)) + self._new_tokens
        self._batch = batch_for_timing(target, drafter, sampling, len(prompts), self._policy, longest)
        self._times: list[list[float]] = [[] for _ in lengths]
        self._turn = 0

    def turn(self) -> None:
        """One round of each length. The first turn of all is not counted."""
        first_seed = self._turn * len(self._prompts)
        requests = [
            Request(ids, self._new_tokens, first_seed + place, ignore_stop=True)
            for place, ids in enumerate(self._prompts)
        ]
        self._batch.enter(list(enumerate(requests)))
        self._policy.length = 0
        self._batch.round()  # the drafter takes in the prompt
        for place in np.roll(np.arange(len(self._lengths)), self._turn):
            self._policy.length = self._lengths[int(place)]
            started = time.perf_counter()
            self._batch.round()
            if self._turn > 0:
                self._times[place].append(time.perf_counter() - started)
        self._batch.leave(list(self._batch.active))
        self._turn += 1

    def means(self) -> list[float]:
        """Mean seconds by length: what many rounds take is their sum. After two turns or more."""
        return [statistics.fmean(of_length) for of_length in self._times]


def round_seconds(
    target: Target,
    drafter: Any,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    repeats: int,
) -> list[float]:
    """Mean seconds of a round by verification length, all turns at once: see ``RoundTimer``."""
    timer = RoundTimer(target, drafter, sampling, prompts, lengths)
    for _ in range(1 + repeats):
        timer.turn()
    return timer.means()


def batch_for_timing(
    target: Target, drafter: Any, sampling: Sampling, num_requests: int, policy: EveryRound, positions: int
) -> DecodingBatch:
    """Rows for requests of so many positions and one block; confidences are calibrated, as a scheduler's are."""
    size = drafter.block_size
    return build_batch(target, drafter, sampling, policy, num_requests, positions + size + 1, identity(size))


def prompts_for_rounds(config: ExperimentConfig, target: Target, count: int) -> list[list[int]]:
    """Held-out prompts, benchmarks in turn, so that drafts are accepted as usual; else those of the evaluation."""
    found = load_benchmarks(config, held_out=8) or load_benchmarks(config)
    by_name = [[r.prompt_ids for r in requests_of(config, target, prompts[:8])] for prompts in found.values()]
    mixed = [ids for group in zip(*by_name, strict=False) for ids in group]
    return [mixed[i % len(mixed)] for i in range(count)]
