"""The greedy prefix scheduler (Algorithm 1): admit the likeliest draft token of all requests until throughput falls.

In: calibrated conditional acceptance of R requests x G positions. Out: verification lengths that maximise expected
tokens per second, tau * SPS(B). Whether x_k is verified depends on c_1..c_k and other requests, never on x_k or what
follows: stopping at the first fall is what keeps the emitted tokens exact (Appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling.capacity import CapacityCurve

_FEW = 1024  # draft tokens up to which a plain stable sort is the faster one


@dataclass(frozen=True)
class Ranking:
    """Draft tokens of a batch by falling survival. ``tokens[n]`` = expected tokens a round after n admissions."""

    request: np.ndarray  # [R*G] request of each admission
    tokens: np.ndarray  # [R*G + 1], starts at R: one token of each request is the target's own

    def lengths(self, admitted: int, num_requests: int) -> np.ndarray:
        """[R] verification lengths after the first ``admitted`` admissions."""
        return np.bincount(self.request[:admitted], minlength=num_requests)


def survivals(confidence_RG: np.ndarray) -> np.ndarray:
    """a_k = c_1 * .. * c_k."""
    return np.cumprod(np.asarray(confidence_RG, dtype=np.float32), axis=1)


def rank(survival_RG: np.ndarray) -> Ranking:
    """Sort all draft tokens by survival, earlier positions first among equals, so that every prefix is a prefix.

    Equal survivals are ordered by place alone: nothing about later tokens decides. Large batches: survivals are at
    least 0, so their bits order as they do; the place goes into the low bits and one integer sort gives both.
    """
    num_requests, size = survival_RG.shape
    count = num_requests * size
    if count <= _FEW:
        falling = -survival_RG.ravel()
        place = falling.argsort(kind="stable")
        return _ranking(place // size, -falling[place], num_requests)
    bits = np.ascontiguousarray(survival_RG, dtype=np.float32).view(np.uint32).ravel().astype(np.uint64)
    keys = np.sort(bits << np.uint64(32) | np.arange(count - 1, -1, -1, dtype=np.uint64))[::-1]
    place = count - 1 - (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    values = (keys >> np.uint64(32)).astype(np.uint32).view(np.float32)
    return _ranking(place // size, values, num_requests)


def _ranking(request: np.ndarray, values: np.ndarray, num_requests: int) -> Ranking:
    tokens = np.empty(len(values) + 1)
    tokens[0] = num_requests
    tokens[1:] = values
    return Ranking(request, tokens.cumsum())


def throughput(tokens: np.ndarray, num_requests: int, curve: CapacityCurve) -> np.ndarray:
    """Expected tokens per second after 0, 1, .. admissions."""
    batch = num_requests + np.arange(len(tokens))
    return tokens / curve.round_s(num_requests, batch)


def greedy_prefix(survival_RG: np.ndarray, curve: CapacityCurve) -> np.ndarray:
    """[R] lengths of Algorithm 1: admissions in order, until one does not raise throughput."""
    num_requests = len(survival_RG)
    ranking = rank(survival_RG)
    theta = throughput(ranking.tokens, num_requests, curve)
    falls = np.flatnonzero(np.diff(theta) <= 0)
    admitted = int(falls[0]) if len(falls) else len(theta) - 1
    return ranking.lengths(admitted, num_requests)


class PrefixScheduler:
    """Algorithm 1 as a verification policy.

    Args:
        curve: the capacity of this machine.
    """

    remembers = False

    def __init__(self, curve: CapacityCurve) -> None:
        self.curve = curve

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Needs a confidence head.

        Raises:
            ConfigError: the drafter has none.
        """
        need_confidence("prefix_scheduler", has_confidence)

    def start(self) -> None:
        """Nothing is remembered between rounds."""

    def observe(self, confidence_RG: np.ndarray | None, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing is remembered between rounds."""

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        return True

    def num_drafting(self, num_requests: int) -> int:
        """All, every round: this round's confidence is what it schedules by."""
        return num_requests

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        assert confidence_RG is not None
        return greedy_prefix(survivals(confidence_RG), self.curve)


def need_confidence(policy: str, has_confidence: bool) -> None:
    """Raise where a policy that reads confidence meets a drafter without it."""
    if not has_confidence:
        raise ConfigError(
            f"policy={policy} needs a drafter with a confidence head (drafter.network.confidence_head=true); this one "
            "has none."
        )
