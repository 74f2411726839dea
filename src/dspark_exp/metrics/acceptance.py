"""Accepted length and acceptance by position, as torchmetrics that keep sums and divide once.

In: per-round counts. Out: the metric sheet's definitions (DESIGN section 5). Knows nothing about models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from dspark_exp.errors import ConfigError


class AcceptedLength(Metric):
    """tau = emitted tokens / rounds, a ratio of sums over everything it saw.

    Example:
        >>> metric = AcceptedLength()
        >>> metric.update(torch.tensor([3, 1]))
        >>> metric.compute().item()
        2.0
    """

    full_state_update = False
    emitted: Tensor
    rounds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("emitted", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rounds", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, emitted_per_round: Tensor) -> None:
        """Add rounds by the number of tokens each one emitted (the target's own token included)."""
        self.emitted += emitted_per_round.sum()
        self.rounds += emitted_per_round.numel()

    def compute(self) -> Tensor:
        return self.emitted / self.rounds.clamp(min=1)


class AcceptanceByPosition(Metric):
    """Conditional acceptance: accepted at k among rounds where 1..k-1 were accepted and k was verified.

    ``survival`` divides by all rounds that drafted position k instead (the reference's own definition).

    Args:
        block_size: gamma.

    Example:
        >>> metric = AcceptanceByPosition(2)
        >>> metric.update(accepted=torch.tensor([2, 1, 0]), verified=torch.tensor([2, 2, 2]))
        >>> [round(v, 2) for v in metric.compute()["conditional"].tolist()]
        [0.67, 0.5]
    """

    full_state_update = False
    accepted: Tensor
    reached: Tensor
    verified: Tensor

    def __init__(self, block_size: int) -> None:
        super().__init__()
        if block_size < 1:
            raise ConfigError(f"Expected argument `block_size` to be at least 1, but got {block_size}.")
        for name in ("accepted", "reached", "verified"):
            self.add_state(name, torch.zeros(block_size, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, accepted: Tensor, verified: Tensor) -> None:
        """Add rounds by accepted [R] and verified [R] draft tokens."""
        position = torch.arange(1, len(self.accepted) + 1, device=accepted.device)
        self.accepted += (accepted[:, None] >= position).sum(0)
        self.reached += ((accepted[:, None] >= position - 1) & (verified[:, None] >= position)).sum(0)
        self.verified += (verified[:, None] >= position).sum(0)

    def compute(self) -> dict[str, Tensor]:
        """``conditional``, ``survival`` [G] (NaN where nothing was seen) and ``counts`` [G] of the former."""
        return {
            "conditional": self.accepted / self.reached,
            "survival": self.accepted / self.verified,
            "counts": self.reached,
        }

    def columns(self) -> dict[str, list[float]]:
        """``compute`` as lists by position; torchmetrics makes a scalar of a single one."""
        return {name: values.reshape(-1).tolist() for name, values in self.compute().items()}
