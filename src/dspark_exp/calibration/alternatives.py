"""What Sequential Temperature Scaling is compared with: isotonic regression, Platt scaling, beta calibration.

In: observations. Out: functions of confidences [N, G] to calibrated confidences. They fit the conditional acceptance
of each position where it is known (all before it accepted); survivals stay products, so they never rise along a block.
Fits are scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from dspark_exp.calibration.observations import Observations, logit
from dspark_exp.calibration.sts import fit_sts
from dspark_exp.errors import ConfigError

Calibrate = Callable[[np.ndarray], np.ndarray]


def _isotonic(confidence: np.ndarray, outcome: np.ndarray) -> Calibrate:
    fit = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(confidence, outcome)
    return lambda values: np.asarray(fit.predict(values))


def _logistic(features: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], Calibrate]:
    def fit(confidence: np.ndarray, outcome: np.ndarray) -> Calibrate:
        model: Any = LogisticRegression(C=1e6).fit(features(confidence), outcome)
        return lambda values: np.asarray(model.predict_proba(features(values))[:, 1])

    return fit


def _beta_features(confidence: np.ndarray) -> np.ndarray:
    """log c and -log(1 - c): logistic regression on them is beta calibration (Kull, Silva Filho and Flach, 2017)."""
    inside = np.clip(confidence, 1e-7, 1 - 1e-7)
    return np.stack([np.log(inside), -np.log1p(-inside)], axis=1)


_BY_POSITION: dict[str, Callable[[np.ndarray, np.ndarray], Calibrate]] = {
    "isotonic": _isotonic,
    "platt": _logistic(lambda confidence: logit(confidence)[:, None]),
    "beta": _logistic(_beta_features),
}
METHODS = ("raw", "sts", *_BY_POSITION)


def fit_method(name: str, observations: Observations) -> Calibrate:
    """A calibration by name: raw, sts, isotonic, platt or beta.

    A position at which only one outcome was seen keeps its confidences.

    Raises:
        ConfigError: unknown name.
    """
    if name not in METHODS:
        raise ConfigError(f"Unknown calibration method {name!r}; choose from {', '.join(METHODS)}.")
    if name == "raw":
        return lambda confidence: confidence
    if name == "sts":
        return fit_sts(observations).apply
    positions: list[Calibrate] = []
    for k in range(observations.block_size):
        reached = observations.reached(k)
        outcome = observations.survived(k)[reached]
        if outcome.all() or not outcome.any():
            positions.append(lambda values: values)
        else:
            positions.append(_BY_POSITION[name](observations.confidence[reached, k], outcome))
    return lambda confidence: np.stack([fit(confidence[:, k]) for k, fit in enumerate(positions)], axis=1)
