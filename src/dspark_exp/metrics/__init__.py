"""The metric sheet: accepted length, acceptance by position, survival calibration, intervals."""

from dspark_exp.metrics.acceptance import AcceptanceByPosition, AcceptedLength
from dspark_exp.metrics.bootstrap import interval, resampled_ratios
from dspark_exp.metrics.confidence import SurvivalCalibration

__all__ = ["AcceptanceByPosition", "AcceptedLength", "SurvivalCalibration", "interval", "resampled_ratios"]
