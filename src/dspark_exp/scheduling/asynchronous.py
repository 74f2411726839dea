"""The asynchronous scheduler (paper, section 5.2): capacity from confidences some rounds old, order from this round's.

The number K of draft tokens is the best point of the whole curve, steps and all, for the survivals of an older round;
this round's survivals only rank. K depends on nothing that is drafted now, so the search may be unconstrained and the
emitted tokens stay exact. K is known before drafting: a round in which drafting does not pay is not drafted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling.capacity import CapacityCurve
from dspark_exp.scheduling.prefix import Ranking, need_confidence, rank, survivals

_LONGER = 4  # by how much the next pause is longer where drafting did not pay again
_KEPT = 0.99  # share of older outcomes that a drafted round leaves in the account
_PRIOR = 8.0  # accepted draft tokens, as promised, that the account begins with
_LISTEN = 8  # where whole blocks have gone through for long, one round in so many is remembered


@dataclass
class _Older:
    """What a past round predicted."""

    time: int  # number of the round
    tokens: np.ndarray  # [R*G + 1] expected tokens after 0, 1, .. admissions
    num_requests: int
    best: tuple[int, int, float] = (0, 0, 0.0)  # requests now, K and expected tokens per second for them


class AsyncScheduler:
    """Dynamic top-K verification.

    K comes from the round that is ``staleness`` rounds old. Whether to draft at all comes from the mean of up to
    ``MEMORY`` such rounds: one request's round says little about its next. After a round without a draft it drafts
    again for one request, and pauses four times as long whenever that did not pay either. A pause ends at once where
    the number of requests is one for which drafting pays.

    What confidences promise is taken for as much as older promises were worth: a drafter that trusts itself too much is
    not drafted for where that does not pay. Older rounds alone decide, so the emitted tokens stay exact.

    Where every block has gone through whole for as many rounds as it remembers, it listens to one round in eight, and
    a round costs what it costs without a scheduler.

    Args:
        curve: the capacity of this machine.
        staleness: age in rounds of the confidences that decide K (the paper: 2).
        probe_every: rounds without a draft in a row at most.
        margin: K is the largest number whose expected throughput is within this share of the best: where the curve
            hardly tells two apart, whole blocks go through in fewer rounds. 0 = the best itself.
        feedback: weigh promises by what older ones were worth; false = take confidences at their word.

    Raises:
        ConfigError: staleness or probe_every below 1, or a margin outside [0, 1). Capacity from this round's own
            confidences is not exact.
    """

    MEMORY = 8

    def __init__(
        self,
        curve: CapacityCurve,
        staleness: int = 2,
        probe_every: int = 256,
        margin: float = 0.02,
        feedback: bool = True,
    ) -> None:
        if not 0 <= margin < 1:
            raise ConfigError(f"policy.margin={margin} must lie in [0, 1).")
        if staleness < 1 or probe_every < 1:
            raise ConfigError(
                f"policy.staleness={staleness} and policy.probe_every={probe_every} must be at least 1: a capacity "
                "from this round's own confidences would let a token decide whether it is verified."
            )
        self.curve, self.staleness, self.probe_every = curve, staleness, probe_every
        self.margin, self.feedback = margin, feedback
        self._scale_per_s = lru_cache(maxsize=64)(self._scale_per_s_of)  # a round costs what it cost in the last one
        self.start()

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Needs a confidence head.

        Raises:
            ConfigError: the drafter has none.
        """
        need_confidence("async_scheduler", has_confidence)

    def start(self) -> None:
        """Forget older rounds: a new batch begins."""
        self._older: deque[_Older] = deque(maxlen=self.staleness + self.MEMORY)
        self._time, self._pause, self._undrafted = 0, 1, 0
        self._promised = self._kept = _PRIOR
        self._survival = np.zeros((0, 0))
        self._whole = 0  # rounds in a row in which all drafted and all was verified
        self._decided, self._decided_for, self._decide_at = True, 0, 0.0

    @property
    def remembers(self) -> bool:
        """Whether ``observe`` is to be told of this round: decided with its lengths."""
        return self._whole <= self.staleness + self.MEMORY or self._whole % _LISTEN == 0

    def num_drafting(self, num_requests: int) -> int:
        """All where drafting beats plain decoding, by what older rounds predict for the requests there are now.

        Else none, or one where a pause is over.
        """
        self._time += 1
        if self._pays(num_requests):
            self._pause, self._undrafted = 1, 0
            return num_requests
        self._whole = 0
        if self._undrafted < self._pause:
            self._undrafted += 1
            return 0
        self._pause, self._undrafted = min(_LONGER * self._pause, self.probe_every), 0
        return 1  # a pause is over: try again where it costs least, and wait longer the next time

    def _pays(self, num_requests: int) -> bool:
        """Whether drafting does, or nothing is known; looked at again when another round is old enough."""
        if num_requests != self._decided_for or self._time >= self._decide_at:
            expected = [self._best(older, num_requests)[1] for older in self._old_enough()]
            plain = num_requests / self.curve.plain_s(num_requests)
            self._decided = not expected or sum(expected) / len(expected) > plain
            due = (older.time + self.staleness for older in self._older)
            self._decide_at = min((time for time in due if time > self._time), default=math.inf)
            self._decided_for = num_requests
        return self._decided

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        """Not where everything is verified: there is nothing to rank, and older rounds have decided that."""
        return self._capacity(num_requests, block_size) < num_requests * block_size

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        if confidence_RG is None:
            self._whole += 1
            return np.full(num_requests, block_size)
        self._whole = 0
        capacity = self._capacity(num_requests, block_size)
        return self._remember(confidence_RG).lengths(capacity, num_requests)

    def observe(self, confidence_RG: np.ndarray | None, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """What later rounds go by: the outcome, and the confidences of a round that was verified whole."""
        if confidence_RG is not None:
            self._remember(confidence_RG)
        verified = np.arange(self._survival.shape[1]) < np.asarray(lengths)[:, None]
        self._promised = _KEPT * self._promised + float(self._survival[verified].sum())
        self._kept = _KEPT * self._kept + float(np.sum(accepted))

    def _remember(self, confidence_RG: np.ndarray) -> Ranking:
        self._survival = survivals(confidence_RG)
        ranking, count = rank(self._survival), len(confidence_RG)
        worth = self._kept / self._promised if self.feedback else 1.0
        self._older.append(_Older(self._time, count + worth * (ranking.tokens - count), count))
        self._decide_at = min(self._decide_at, self._time + self.staleness)
        return ranking

    def _capacity(self, num_requests: int, block_size: int) -> int:
        """K for so many requests; all where nothing is known."""
        if not self._older:
            return num_requests * block_size
        older = (self._old_enough() or [self._older[0]])[-1]
        return min(num_requests * block_size, self._best(older, num_requests)[0])

    def _old_enough(self) -> list[_Older]:
        return [older for older in self._older if self._time - older.time >= self.staleness]

    def _best(self, older: _Older, num_requests: int) -> tuple[int, float]:
        """K and expected tokens per second, for the older survivals spread over the requests there are now."""
        if older.best[0] != num_requests:
            scale = num_requests / older.num_requests
            theta = older.tokens * self._scale_per_s(num_requests, older.num_requests, len(older.tokens))
            best = float(theta.max())
            place = int((theta >= (1 - self.margin) * best).nonzero()[0][-1])
            older.best = num_requests, round(place * scale), best
        return older.best[1:]

    def _scale_per_s_of(self, num_requests: int, num_older: int, count: int) -> np.ndarray:
        """[count] what expected tokens after 0, 1, .. admissions among ``num_older`` requests are multiplied by: how
        many more requests there are now, over the seconds of their round."""
        scale = num_requests / num_older
        seconds: np.ndarray = self.curve.round_s(num_requests, num_requests + np.arange(count) * scale)
        return scale / seconds
