"""Seeded draws that know how surprising they were.

In: a seed string. Out: choices, and the sum of their information in nats, which is the exact
negative log-probability of an answer whose text determines its choices. Knows nothing about domains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Uniform draws from one seeded generator; ``nats`` is the information drawn so far."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def one_of(self, options: Sequence[T]) -> T:
        """One option, each equally likely."""
        self.nats += math.log(len(options))
        return options[self._random.randrange(len(options))]

    def two_of(self, options: Sequence[T]) -> tuple[T, T]:
        """Two different options in drawn order."""
        first = self.one_of(options)
        second = self.one_of([option for option in options if option != first])
        return first, second

    def between(self, low: int, high: int) -> int:
        """An integer of [low, high], both ends included."""
        return self.one_of(range(low, high + 1))
