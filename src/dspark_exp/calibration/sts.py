"""Sequential Temperature Scaling (paper, section 3.2.1): one temperature a position, fitted left to right.

In: observations. Out: temperatures that make survivals a_k = prod_i sigmoid(z_i / T_i) match how often prefixes of
length k are accepted. Each T_k minimises the ECE of a_k with all earlier temperatures held; among temperatures that are
as good within half a standard error it is the one nearest 1, so that noise does not move a position that needs nothing.
Within a position the order of confidences does not change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dspark_exp.calibration.observations import Observations, expected_calibration_error, sigmoid
from dspark_exp.errors import ConfigError

TOLERANCE = 0.5  # standard errors of an ECE within which two temperatures count as equally good
GRID = np.exp(np.linspace(np.log(0.1), np.log(10.0), 241))
_SMALLEST = 1e-12  # confidence below which odds are no longer told apart
_FEWEST = 20  # rounds below which a position keeps its neighbour's temperature


@dataclass(frozen=True)
class Calibration:
    """Temperatures and where they come from. ``apply`` is what decoding does to confidences."""

    temperatures: tuple[float, ...]
    dataset: str = ""
    fitted_on: str = ""  # hash of the observations
    num_samples: int = 0
    ece_before: tuple[float, ...] = field(default=())
    ece_after: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ConfigError(f"Calibration temperatures must be above 0; got {self.temperatures}.")

    def apply(self, confidence_RG: np.ndarray) -> np.ndarray:
        """Calibrated conditional acceptance of confidences [R, G]: sigmoid(logit(c) / T), written without logits."""
        odds_against = 1.0 / np.maximum(confidence_RG, _SMALLEST) - 1.0
        return 1.0 / (1.0 + odds_against**self._inverse)

    @cached_property
    def _inverse(self) -> np.ndarray:
        return 1.0 / np.asarray(self.temperatures)

    def check(self, block_size: int) -> None:
        """Raise ConfigError where a drafter has another block size."""
        if len(self.temperatures) != block_size:
            raise ConfigError(
                f"The calibration has {len(self.temperatures)} temperatures, the drafter drafts {block_size} tokens: "
                "fit it again (+experiment=reliability)."
            )

    def as_dict(self) -> dict[str, Any]:
        """The fields that SGLang and TensorRT-LLM read, and the hash of what it was fitted on."""
        return {
            "temperatures": list(self.temperatures),
            "sts_temperatures": list(self.temperatures),
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            "fitted_on": self.fitted_on,
        }

    @staticmethod
    def of_dict(stored: dict[str, Any]) -> Calibration:
        """The other way; a file of an engine's own fitter has no hash."""
        temperatures = stored.get("temperatures") or stored.get("sts_temperatures")
        if not temperatures:
            raise ConfigError(f"A calibration needs temperatures; this one has {', '.join(stored) or 'nothing'}.")
        return Calibration(
            tuple(float(t) for t in temperatures),
            str(stored.get("dataset", "")),
            str(stored.get("fitted_on", "")),
            int(stored.get("num_samples", 0)),
            tuple(stored.get("ece_before", ())),
            tuple(stored.get("ece_after", ())),
        )


def identity(block_size: int) -> Calibration:
    """Temperatures that change nothing."""
    return Calibration((1.0,) * block_size)


def read_calibration(path: str | Path) -> Calibration:
    """A calibration file of ours or of an engine's fitter.

    Raises:
        ConfigError: unreadable, or without temperatures above 0.
    """
    try:
        stored = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"No calibration at {path}: {error}. Fit one with +experiment=reliability.") from error
    return Calibration.of_dict(stored)


def fit_sts(observations: Observations, dataset: str = "") -> Calibration:
    """Fit left to right. A position that fewer than 20 rounds verified keeps the temperature before it."""
    temperatures: list[float] = []
    before, after = [], []
    fitted, raw = np.ones(len(observations)), np.ones(len(observations))
    for k in range(observations.block_size):
        z, seen, outcome = observations.logits[:, k], observations.seen(k), observations.survived(k)
        if seen.sum() < _FEWEST:
            best = temperatures[-1] if temperatures else 1.0
        else:
            best = _best_temperature(fitted[seen], z[seen], outcome[seen])
        temperatures.append(best)
        fitted = fitted * sigmoid(z / best)
        raw = raw * sigmoid(z)
        before.append(expected_calibration_error(raw[seen], outcome[seen]))
        after.append(expected_calibration_error(fitted[seen], outcome[seen]))
    return Calibration(
        tuple(temperatures), dataset, observations.digest(), len(observations), tuple(before), tuple(after)
    )


def _best_temperature(earlier: np.ndarray, logits: np.ndarray, outcome: np.ndarray) -> float:
    """The temperature nearest 1 whose ECE is within ``TOLERANCE`` standard errors of the lowest."""
    predicted = [earlier * sigmoid(logits / t) for t in GRID]
    errors = np.array([expected_calibration_error(p, outcome) for p in predicted])
    best = predicted[int(errors.argmin())]
    standard_error = float(np.sqrt(((best - outcome) ** 2).sum()) / len(outcome))
    good = np.flatnonzero(errors <= errors.min() + TOLERANCE * standard_error)
    return float(GRID[good[np.abs(np.log(GRID[good])).argmin()]])
