"""The capacity curve SPS(B): target passes per second at a forward batch of B tokens, as measured, never smoothed.

In: a table that ``task=profile_capacity`` wrote. Out: seconds of a pass of B tokens, and of drafting for R requests.
The file has the field names that serving engines read (INTEROP E.4).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark_exp.errors import ConfigError

_IDENTITY = ("model", "revision", "dtype", "device")


@dataclass(frozen=True)
class CapacityCurve:
    """Seconds of a verification pass by its tokens, and of a draft by its requests.

    Between two measured points the seconds lie on the line through them; beyond the last, on the line through the last
    two. Measured points stay what they are, so a jagged curve stays jagged.

    Args:
        tokens, seconds: B (strictly increasing, from 1) and seconds of one target pass.
        requests, draft_seconds: R and seconds of drafting and extending for R requests; none = drafting is free, as in
            the paper's Algorithm 1.

    Raises:
        ConfigError: lengths differ, tokens do not increase, or a time is not above zero.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    requests: np.ndarray = field(default_factory=lambda: np.zeros(0))
    draft_seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        for name, x, y in (("tokens", self.tokens, self.seconds), ("requests", self.requests, self.draft_seconds)):
            if len(x) != len(y) or (np.diff(x) <= 0).any() or (np.asarray(y) <= 0).any():
                raise ConfigError(f"A capacity curve needs {name} that increase and one time above 0 for each.")
        if not len(self.tokens):
            raise ConfigError("A capacity curve needs at least one measured batch.")

    def step_s(self, tokens: Any) -> np.ndarray:
        """Seconds of a target pass of ``tokens`` tokens."""
        return _lookup(tokens, self.tokens, self.seconds)

    def draft_s(self, requests: int) -> float:
        """Seconds of drafting for ``requests`` requests."""
        return float(_lookup(requests, self.requests, self.draft_seconds)) if len(self.requests) else 0.0

    def steps_per_s(self, tokens: Any) -> np.ndarray:
        """SPS(B)."""
        return 1.0 / self.step_s(tokens)

    @staticmethod
    def of_steps_per_s(tokens: Any, steps_per_s: Any) -> CapacityCurve:
        """A curve from SPS values."""
        return CapacityCurve(np.asarray(tokens, float), 1.0 / np.asarray(steps_per_s, float))


def _lookup(at: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    at = np.asarray(at, float)
    inside = np.interp(at, x, y)
    if len(x) < 2:
        return inside
    slope = max(0.0, float((y[-1] - y[-2]) / (x[-1] - x[-2])))
    return np.where(at > x[-1], y[-1] + slope * (at - x[-1]), inside)


@dataclass(frozen=True)
class CapacityTable:
    """What was measured: curves by context length, spreads, and on what.

    Attributes:
        tokens: B of every measured pass.
        context_lengths: tokens already in the cache of each request.
        seconds: [contexts, tokens] medians; spread: the same, half the interquartile range.
        requests, draft_seconds: seconds of drafting for R requests; empty without a drafter.
        measured: model, revision, dtype, device, threads, attention, drafter, block size.
    """

    tokens: list[int]
    context_lengths: list[int]
    seconds: list[list[float]]
    spread: list[list[float]]
    requests: list[int]
    draft_seconds: list[float]
    measured: dict[str, Any]

    def curve(self, context: float | None = None) -> CapacityCurve:
        """The curve at a context length, on the line between the two measured around it; null = the shortest."""
        seconds = np.asarray(self.seconds)
        at = self.context_lengths[0] if context is None else context
        columns = [float(np.interp(at, self.context_lengths, seconds[:, b])) for b in range(len(self.tokens))]
        return CapacityCurve(
            np.asarray(self.tokens, float),
            np.asarray(columns),
            np.asarray(self.requests, float),
            np.asarray(self.draft_seconds),
        )

    def check(self, wanted: dict[str, Any], force: bool = False) -> None:
        """Refuse a table of another model or device.

        Raises:
            ConfigError: naming what differs; ``force`` (``scheduling.force``) lets it pass.
        """
        differing = [
            f"{name} {self.measured.get(name)!r} (here {wanted[name]!r})"
            for name in _IDENTITY
            if name in wanted and self.measured.get(name) != wanted[name]
        ]
        if differing and not force:
            raise ConfigError(
                f"The capacity table was measured with {', '.join(differing)}: measure again (task=profile_capacity) "
                "or take it as it is (scheduling.force=true)."
            )

    def as_dict(self) -> dict[str, Any]:
        """The file: SGLang's and TensorRT-LLM's fields first, ours beside them."""
        return {
            "sample_batch_tokens": self.tokens,
            "sample_steps_per_sec": [1.0 / s for s in self.seconds[0]],
            "max_batch_tokens": self.tokens[-1],
            **vars(self),
        }


def read_table(path: str | Path) -> CapacityTable:
    """A table that ``task=profile_capacity`` or an engine's profiler wrote.

    Raises:
        ConfigError: no such file, or not a capacity table; the message says how to make one.
    """
    try:
        stored = json.loads(Path(path).read_text())
        tokens = [int(t) for t in stored["sample_batch_tokens"]]
        plain = [[1.0 / s for s in stored["sample_steps_per_sec"]]]
        return CapacityTable(
            tokens,
            stored.get("context_lengths", [0]),
            stored.get("seconds", plain),
            stored.get("spread", [[0.0] * len(tokens)]),
            stored.get("requests", []),
            stored.get("draft_seconds", []),
            stored.get("measured", {}),
        )
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"No capacity table at {path}: measure one with `python -m dspark_exp task=profile_capacity …` and give it "
            f"with scheduling.table=FILE. {type(error).__name__}: {error}"
        ) from error
