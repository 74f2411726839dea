"""Bootstrap intervals over prompts for ratios of sums. Numpy only."""

from __future__ import annotations

import numpy as np

NUM_RESAMPLES = 2000


def resampled_ratios(emitted: np.ndarray, rounds: np.ndarray, seed: int = 0) -> np.ndarray:
    """``NUM_RESAMPLES`` values of sum(emitted) / sum(rounds) over prompts drawn with replacement."""
    generator = np.random.default_rng(seed)
    index = generator.integers(0, len(emitted), size=(NUM_RESAMPLES, len(emitted)))
    return np.asarray(emitted)[index].sum(1) / np.maximum(np.asarray(rounds)[index].sum(1), 1)


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The central ``level`` of resampled values."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
