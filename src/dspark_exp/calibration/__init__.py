"""Confidence that tells the truth: Sequential Temperature Scaling and what it is compared with. Knows no model."""

from dspark_exp.calibration.alternatives import METHODS, fit_method
from dspark_exp.calibration.observations import Observations, expected_calibration_error, logit, read_shards
from dspark_exp.calibration.sts import Calibration, fit_sts, identity, read_calibration

__all__ = [
    "METHODS",
    "Calibration",
    "Observations",
    "expected_calibration_error",
    "fit_method",
    "fit_sts",
    "identity",
    "logit",
    "read_calibration",
    "read_shards",
]
