"""Difficulty-aware drafting: requests whose drafts keep failing are not drafted for (the paper's future work).

In: the rounds of each request so far. Out: which requests draft this round. Nothing that is drafted now takes part in
the decision, so the emitted tokens stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_exp.decoding.requests import Round
from dspark_exp.errors import ConfigError


@dataclass(frozen=True)
class EarlyExit:
    """A request drafts while its recent drafts pay, and tries again after a pause.

    Args:
        min_accepted: mean accepted draft tokens of the last ``window`` drafted rounds below which a request stops.
        window: drafted rounds that are looked at; before there are so many a request drafts.
        pause: rounds without a draft before it tries again.

    Raises:
        ConfigError: a negative mean, or window or pause below 1.
    """

    min_accepted: float
    window: int = 4
    pause: int = 8

    def __post_init__(self) -> None:
        if self.min_accepted < 0 or self.window < 1 or self.pause < 1:
            raise ConfigError(
                "drafter.early_exit needs min_accepted >= 0, window >= 1 and pause >= 1; got "
                f"min_accepted={self.min_accepted}, window={self.window}, pause={self.pause}."
            )

    def drafts(self, rounds: Sequence[Round]) -> bool:
        """Whether a request with these rounds behind it drafts now."""
        undrafted = 0
        recent: list[int] = []
        for past in reversed(rounds):
            if past.drafted:
                recent.append(past.accepted)
            elif not recent:
                undrafted += 1
            if len(recent) == self.window or undrafted >= self.pause:
                break
        if undrafted >= self.pause or len(recent) < self.window:
            return True
        return sum(recent) / self.window >= self.min_accepted
