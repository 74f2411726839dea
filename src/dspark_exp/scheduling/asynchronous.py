"""The asynchronous scheduler (paper, section 5.2): capacity from confidences some rounds old, order from this round's.

The number K of draft tokens is the best point of the whole curve, steps and all, for the survivals of an older round;
this round's survivals only rank. K depends on nothing that is drafted now, so the search may be unconstrained and the
emitted tokens stay exact. K is known before drafting: a round in which drafting does not pay is not drafted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling.capacity import CapacityCurve
from dspark_exp.scheduling.prefix import Ranking, need_confidence, rank, survivals


@dataclass(frozen=True)
class _Older:
    """What a past round predicted."""

    tokens: np.ndarray  # [R*G + 1] expected tokens after 0, 1, .. admissions
    num_requests: int


class AsyncScheduler:
    """Dynamic top-K verification.

    Args:
        curve: the capacity of this machine.
        staleness: age in rounds of the confidences that decide K (the paper: 2).
        probe_every: draft at least once in this many rounds, to hear new confidences.

    Raises:
        ConfigError: staleness or probe_every below 1. Capacity from this round's own confidences is not exact.
    """

    reads_confidence = True

    def __init__(self, curve: CapacityCurve, staleness: int = 2, probe_every: int = 32) -> None:
        if staleness < 1 or probe_every < 1:
            raise ConfigError(
                f"policy.staleness={staleness} and policy.probe_every={probe_every} must be at least 1: a capacity "
                "from this round's own confidences would let a token decide whether it is verified."
            )
        self.curve, self.staleness, self.probe_every = curve, staleness, probe_every
        self.start()

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Needs a confidence head.

        Raises:
            ConfigError: the drafter has none.
        """
        need_confidence("async_scheduler", has_confidence)

    def start(self) -> None:
        """Forget older rounds: a new batch begins."""
        self._older: deque[_Older] = deque(maxlen=self.staleness)
        self._undrafted = 0

    def drafts(self, num_requests: int) -> bool:
        """Whether the best K beats plain decoding, by what older rounds predicted."""
        if not self._older or self._undrafted + 1 >= self.probe_every:
            self._undrafted = 0
            return True
        plain = num_requests / self.curve.plain_s(num_requests)
        if self._best(self._older[0], num_requests)[1] > plain:
            self._undrafted = 0
            return True
        self._undrafted += 1
        return False

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        assert confidence_RG is not None
        ranking = rank(survivals(confidence_RG))
        capacity = num_requests * block_size
        if self._older:
            capacity = min(capacity, self._best(self._older[0], num_requests)[0])
        self._remember(ranking, num_requests)
        return ranking.lengths(capacity, num_requests)

    def _remember(self, ranking: Ranking, num_requests: int) -> None:
        self._older.append(_Older(ranking.tokens, num_requests))

    def _best(self, older: _Older, num_requests: int) -> tuple[int, float]:
        """K and expected tokens per second, for the older survivals spread over the requests there are now."""
        scale = num_requests / older.num_requests
        admitted = np.arange(len(older.tokens)) * scale
        theta = older.tokens * scale / self.curve.round_s(num_requests, num_requests + admitted)
        best = int(theta.argmax())
        return round(admitted[best]), float(theta[best])
