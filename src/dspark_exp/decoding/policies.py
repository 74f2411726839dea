"""Verification policies: how many drafted tokens are verified.

In: predicted conditional acceptance. Out: a length per request. All are non-anticipating: whether x_k is verified
depends on c_1..c_k, never on x_k or what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_exp.errors import ConfigError


class VerificationPolicy(Protocol):
    """Chooses verification lengths."""

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Raise ConfigError if the drafter cannot be verified by this policy."""

    def lengths(self, confidence_RG: Tensor | None, num_requests: int, block_size: int) -> Tensor:
        """[R] integers within 0..G."""


@dataclass(frozen=True)
class Full:
    """Verify the whole block (the paper's offline evaluation)."""

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Fits every drafter."""

    def lengths(self, confidence_RG: Tensor | None, num_requests: int, block_size: int) -> Tensor:
        return torch.full((num_requests,), block_size)


@dataclass(frozen=True)
class Fixed:
    """Verify the first ``length`` tokens."""

    length: int

    def check(self, block_size: int, has_confidence: bool) -> None:
        """The length must fit the block."""
        if not 0 <= self.length <= block_size:
            raise ConfigError(f"policy.length={self.length} must lie within 0..{block_size} (block size).")

    def lengths(self, confidence_RG: Tensor | None, num_requests: int, block_size: int) -> Tensor:
        return torch.full((num_requests,), self.length)


@dataclass(frozen=True)
class Threshold:
    """Cut before the first position whose conditional confidence falls below ``threshold``."""

    threshold: float

    def check(self, block_size: int, has_confidence: bool) -> None:
        """Needs a confidence head and a threshold in [0, 1]."""
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"policy.threshold={self.threshold} must lie in [0, 1].")
        if not has_confidence:
            raise ConfigError(
                "policy=threshold needs a drafter with a confidence head "
                "(drafter.network.confidence_head=true); this one has none."
            )

    def lengths(self, confidence_RG: Tensor | None, num_requests: int, block_size: int) -> Tensor:
        assert confidence_RG is not None
        return (confidence_RG >= self.threshold).int().cumprod(-1).sum(-1).cpu()
