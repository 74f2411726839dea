"""The errors a user can cause, each with a sentence that says what was given, what is allowed, what to do.

Knows nothing about the rest of the package; every room may import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class DsparkError(Exception):
    """Root of all errors that the command line prints as one sentence."""


class ConfigError(DsparkError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(DsparkError):
    """Input data is missing, empty, malformed or belongs to something else."""


class TargetError(DsparkError):
    """A target model cannot be loaded or lacks a fact that drafting needs."""


class LaunchError(DsparkError):
    """Processes of a job on several devices could not start, failed, or were killed."""


class Pruned(DsparkError):
    """A search ended this trial early; nobody's fault.

    Attributes:
        curve: the validations until then, points with ``step`` and ``tau``.
    """

    def __init__(self, curve: Sequence[Mapping[str, float]]) -> None:
        self.curve = list(curve)
        self.step, self.tau = int(curve[-1]["step"]), max(point["tau"] for point in curve)
        super().__init__(f"ended early at step {self.step}, best val/tau {self.tau:.2f}")


class CheckpointError(DsparkError):
    """A checkpoint is missing, incomplete or does not fit the model."""
