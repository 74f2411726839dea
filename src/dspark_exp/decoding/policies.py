"""Verification policies: how many drafted tokens are verified, and for how many requests a round drafts.

In: calibrated conditional acceptance. Out: a length per request. All are non-anticipating: whether x_k is verified
depends on c_1..c_k and older rounds, never on x_k or what follows. The schedulers of ``dspark_exp.scheduling`` are
policies, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling import need_confidence


class VerificationPolicy(Protocol):
    """Chooses verification lengths. One object serves one batch of requests at a time."""

    @property
    def remembers(self) -> bool:
        """Whether ``observe`` is called."""

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        """Whether ``lengths`` needs this round's confidences, which costs one more read of the device."""

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Raise ConfigError if the drafter cannot be verified by this policy."""

    def start(self) -> None:
        """A new batch begins: forget older rounds."""

    def num_drafting(self, num_requests: int) -> int:
        """For how many of the requests this round drafts; decided before drafting, from older rounds alone."""

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        """[R] integers within 0..G, for the R requests that draft."""

    def observe(self, confidence_RG: np.ndarray | None, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """The round is over: lengths and accepted draft tokens [R] of the requests that drafted, and confidences where
        ``lengths`` needed none."""


class Rotation:
    """Which requests draft where not all do: each in its turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, count: int, num_requests: int) -> list[int]:
        """``count`` of the places 0 .. R-1, increasing; the next call goes on after the last of them."""
        if count >= num_requests:
            return list(range(num_requests))
        start = self._next % num_requests
        self._next = start + count
        return sorted((start + i) % num_requests for i in range(count))


def check_policy(policy: VerificationPolicy, drafter: Any) -> None:
    """Raise ConfigError if the drafter cannot be verified by this policy."""
    policy.check(drafter.block_size, getattr(drafter, "confidence_head", None) is not None)


class _Static:
    """What policies without memory share."""

    remembers = False

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        return False

    def observe(self, confidence_RG: np.ndarray | None, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing is remembered."""

    def start(self) -> None:
        """Nothing is remembered."""

    def num_drafting(self, num_requests: int) -> int:
        """All, every round."""
        return num_requests


@dataclass(frozen=True)
class Full(_Static):
    """Verify the whole block (the paper's offline evaluation)."""

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Fits every drafter."""

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        return np.full(num_requests, block_size)


@dataclass(frozen=True)
class Fixed(_Static):
    """Verify the first ``length`` tokens. With length 0 nothing is drafted."""

    length: int

    def check(self, block_size: int, has_confidence: bool) -> None:
        """The length must fit the block."""
        if not 0 <= self.length <= block_size:
            raise ConfigError(f"policy.length={self.length} must lie within 0..{block_size} (block size).")

    def num_drafting(self, num_requests: int) -> int:
        """None where nothing would be verified."""
        return num_requests if self.length > 0 else 0

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        return np.full(num_requests, self.length)


@dataclass(frozen=True)
class Threshold(_Static):
    """Cut before the first position whose conditional confidence falls below ``threshold``."""

    threshold: float

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        return True

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Needs a confidence head and a threshold in [0, 1]."""
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"policy.threshold={self.threshold} must lie in [0, 1].")
        need_confidence("threshold", has_confidence)

    def lengths(self, confidence_RG: np.ndarray | None, num_requests: int, block_size: int) -> np.ndarray:
        assert confidence_RG is not None
        return (confidence_RG >= self.threshold).cumprod(axis=1).sum(axis=1)
