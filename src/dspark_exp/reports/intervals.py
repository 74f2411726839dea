"""A mean with its 95% interval. Knows nothing about what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """Student's t over training runs, or, of a single run, a bootstrap over prompts."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of_runs(values: Sequence[float]) -> Interval:
        """Of two runs or more."""
        mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error
        return Interval(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"
