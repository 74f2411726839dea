"""The capacity curve SPS(B): target passes per second at a forward batch of B tokens, as measured, never smoothed.

In: a table that ``task=profile_capacity`` wrote. Out: seconds of a pass of B tokens, and of whole rounds of R requests,
drafted or not. The file has the field names that serving engines read (INTEROP E.4).
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
class Rounds:
    """Seconds of whole rounds of the engine: drafting, verification, host.

    Attributes:
        requests: [n] R, increasing. lengths: [m] verified draft tokens of each request, increasing from 0.
        seconds: [n, m] of a drafted round. plain: [n] of a round without a draft.
        prompt_tokens, enter: [p] seconds of taking in so many prompt tokens, the drafter's part included.
    """

    requests: np.ndarray
    lengths: np.ndarray
    seconds: np.ndarray
    plain: np.ndarray
    prompt_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0))
    enter: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class CapacityCurve:
    """What a round costs.

    With ``rounds`` it is what whole rounds of this engine took. Without, drafting is free and a round is one pass, as
    in the paper's Algorithm 1: 1 / SPS(B). Between two measured points the seconds lie on the line through them; beyond
    the last, on the line through the last two. Measured points stay what they are: a jagged curve stays jagged.

    Args:
        tokens, seconds: B (increasing, from 1) and seconds of one target pass.
        rounds: whole rounds, if they were measured.

    Raises:
        ConfigError: lengths differ, tokens do not increase, or a time is not above zero.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    rounds: Rounds | None = field(default=None)
    _of_requests: dict[int, tuple[np.ndarray, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) or len(self.tokens) != len(self.seconds):
            raise ConfigError("A capacity curve needs one time for each of at least one batch of tokens.")
        if (np.diff(self.tokens) <= 0).any() or (np.asarray(self.seconds) <= 0).any():
            raise ConfigError("A capacity curve needs tokens that increase and times above 0.")

    def step_s(self, tokens: Any) -> np.ndarray:
        """Seconds of a target pass of ``tokens`` tokens."""
        return _lookup(tokens, self.tokens, self.seconds)

    def steps_per_s(self, tokens: Any) -> np.ndarray:
        """SPS(B)."""
        return 1.0 / self.step_s(tokens)

    def round_s(self, num_requests: int, tokens: Any) -> np.ndarray:
        """Seconds of a drafted round of R requests that verifies ``tokens`` tokens, anchors included."""
        if self.rounds is None:
            return self.step_s(tokens)
        mean = np.asarray(tokens, float) / num_requests - 1
        drafted = self._measured_for(num_requests, self.rounds)[0]
        return np.where(mean >= self.rounds.lengths[-1], drafted[-1], _lookup(mean, self.rounds.lengths, drafted[:-1]))

    def plain_s(self, num_requests: int) -> float:
        """Seconds of a round of R requests without a draft."""
        if self.rounds is None:
            return float(self.step_s(num_requests))
        return self._measured_for(num_requests, self.rounds)[1]

    def enter_s(self, prompt_tokens: int) -> float:
        """Seconds of taking in requests with so many prompt tokens in all."""
        if self.rounds is None or not len(self.rounds.enter):
            return float(self.step_s(prompt_tokens))
        return float(_lookup(prompt_tokens, self.rounds.prompt_tokens, self.rounds.enter))

    def _measured_for(self, num_requests: int, measured: Rounds) -> tuple[np.ndarray, float]:
        """Seconds by verification length, then of whole blocks, and of a round without a draft.

        Kept, since schedulers ask every round.
        """
        if num_requests not in self._of_requests:
            drafted = [float(_lookup(num_requests, measured.requests, column)) for column in measured.seconds.T]
            plain = float(_lookup(num_requests, measured.requests, measured.plain))
            # whole blocks need no gathering: rounds just short of them cost what the line through shorter ones says
            nearly = max(drafted[-1], 2 * drafted[-2] - drafted[-3]) if len(drafted) > 2 else drafted[-1]
            self._of_requests[num_requests] = np.asarray([*drafted[:-1], nearly, drafted[-1]]), plain
        return self._of_requests[num_requests]

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
    """What was measured, and on what.

    Attributes:
        tokens: B of every measured pass.
        context_lengths: tokens already in the cache of each request.
        seconds: [contexts, tokens] medians; spread: the same, half the interquartile range.
        rounds: whole rounds of the engine, the fields of ``Rounds``, on prompts of the benchmarks; empty where only
            passes were measured.
        measured: model, revision, dtype, device, threads, attention, drafter, block size.
    """

    tokens: list[int]
    context_lengths: list[int]
    seconds: list[list[float]]
    spread: list[list[float]]
    rounds: dict[str, Any]
    measured: dict[str, Any]

    def curve(self, context: float | None = None) -> CapacityCurve:
        """The curve at a context length, on the line between the two measured around it; null = the shortest.

        Whole rounds take longer than at the shortest by as much as the pass does.
        """
        seconds, shortest = np.asarray(self.seconds), self.context_lengths[0]
        at = shortest if context is None else context
        columns = [float(np.interp(at, self.context_lengths, seconds[:, b])) for b in range(len(self.tokens))]
        passes = CapacityCurve(np.asarray(self.tokens, float), np.asarray(columns))
        if not self.rounds:
            return passes
        base = CapacityCurve(np.asarray(self.tokens, float), seconds[0])
        requests, lengths = (np.asarray(self.rounds[name], float) for name in ("requests", "lengths"))
        batches = requests[:, None] * (1 + lengths)
        longer = passes.step_s(batches) - base.step_s(batches)
        measured = Rounds(
            requests,
            lengths,
            np.asarray(self.rounds["seconds"]) + longer,
            np.asarray(self.rounds["plain"]) + longer[:, 0],
            np.asarray(self.rounds.get("prompt_tokens", []), float),
            np.asarray(self.rounds.get("enter", []), float),
        )
        return CapacityCurve(passes.tokens, passes.seconds, measured)

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
            stored.get("rounds", {}),
            stored.get("measured", {}),
        )
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"No capacity table at {path}: measure one with `python -m dspark_exp task=profile_capacity …` and give it "
            f"with scheduling.table=FILE. {type(error).__name__}: {error}"
        ) from error
