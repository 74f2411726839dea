"""What calibration is fitted on and judged by: confidences of rounds and what verification made of them.

In: rounds of our own decoding, or shards that a serving engine recorded. Out: logits, outcomes and which were seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_exp.errors import DataError

NUM_BINS = 20  # equal-width, as the reference's evaluator
_EDGE = 1e-7


@dataclass(frozen=True)
class Observations:
    """N rounds of G positions. ``accepted[n]`` tokens of ``verified[n]`` passed; ``group[n]`` is the round's prompt.

    ``overlap`` is the analytic acceptance rate of every position, 1 - TV(p_d, p_t) (Eq. 8), where it was recorded.
    """

    logits: np.ndarray  # [N, G]
    accepted: np.ndarray  # [N]
    verified: np.ndarray  # [N]
    group: np.ndarray  # [N]
    overlap: np.ndarray | None = None  # [N, G]

    @staticmethod
    def of_rounds(prompts: Sequence[Sequence[dict[str, Any]]]) -> Observations:
        """Recorded rounds by prompt, each with ``confidence``, ``accepted`` and ``verified``.

        Raises:
            DataError: no round, or a drafter without confidences.
        """
        rounds = [(index, r) for index, prompt in enumerate(prompts) for r in prompt]
        if not rounds or not rounds[0][1]["confidence"]:
            raise DataError(
                "There is nothing to calibrate: no recorded round has confidences "
                "(drafter.network.confidence_head=true gives them)."
            )
        return Observations(
            logit(np.array([r["confidence"] for _, r in rounds])),
            np.array([r["accepted"] for _, r in rounds]),
            np.array([r["verified"] for _, r in rounds]),
            np.array([index for index, _ in rounds]),
            np.array([r["overlap"] for _, r in rounds]) if all(r.get("overlap") for _, r in rounds) else None,
        )

    @staticmethod
    def join(parts: Sequence[Observations]) -> Observations:
        """Several sets as one; prompts stay apart."""
        overlaps = [p.overlap for p in parts if p.overlap is not None]
        offsets = np.cumsum([0, *(int(p.group.max(initial=-1)) + 1 for p in parts[:-1])])
        return Observations(
            np.concatenate([p.logits for p in parts]),
            np.concatenate([p.accepted for p in parts]),
            np.concatenate([p.verified for p in parts]),
            np.concatenate([p.group + offset for p, offset in zip(parts, offsets, strict=True)]),
            None if len(overlaps) < len(parts) else np.concatenate(overlaps),
        )

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def block_size(self) -> int:
        return self.logits.shape[1]

    @property
    def confidence(self) -> np.ndarray:
        """[N, G] predicted conditional acceptance."""
        return sigmoid(self.logits)

    def seen(self, position: int) -> np.ndarray:
        """[N] rounds that verified this 0-based position."""
        return self.verified > position

    def survived(self, position: int) -> np.ndarray:
        """[N] rounds in which this position and all before it were accepted."""
        return self.accepted > position

    def reached(self, position: int) -> np.ndarray:
        """[N] rounds that verified this position and accepted all before it: where its conditional outcome is known."""
        return self.seen(position) & (self.accepted >= position)

    def digest(self) -> str:
        """Hash of what was seen."""
        parts = (self.logits.astype(np.float32), self.accepted.astype(np.int32), self.verified.astype(np.int32))
        return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()[:16]


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(values, dtype=np.float64)))


def logit(confidence: np.ndarray) -> np.ndarray:
    """Logits of confidences in [0, 1]; 0 and 1 stay finite."""
    inside = np.clip(np.asarray(confidence, dtype=np.float64), _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)


def expected_calibration_error(predicted_N: np.ndarray, outcome_N: np.ndarray) -> float:
    """ECE of probabilities against booleans over 20 equal-width bins; NaN without predictions."""
    if not len(predicted_N):
        return float("nan")
    index = np.minimum((predicted_N * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    sums = np.bincount(index, weights=predicted_N - outcome_N, minlength=NUM_BINS)
    return float(np.abs(sums).sum() / len(predicted_N))


def read_shards(pattern: str) -> Observations:
    """Logits and prefix masks that SGLang or TensorRT-LLM recorded from served traffic (``stem.<n>.pt``).

    Raises:
        DataError: no such file, another layout, or a mask that is no prefix (its pairs are mislabelled).
    """
    place = Path(pattern)
    paths = sorted(place.parent.glob(place.name)) if not place.is_dir() else sorted(place.glob("*.pt"))
    if not paths:
        raise DataError(
            f"calibration.from={pattern}: no file matches; give a folder of shards or a pattern like DIR/*.pt."
        )
    parts = [_read_shard(path) for path in paths]
    if len({p.block_size for p in parts}) > 1:
        raise DataError(f"calibration.from={pattern}: the shards have different block sizes.")
    return Observations.join(parts)


def _read_shard(path: Path) -> Observations:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        logits, mask = stored["logits"].double().numpy(), stored["prefix_mask"].numpy() > 0.5
    except (OSError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is no calibration shard with logits and prefix_mask [N, gamma]: {error}") from error
    if logits.shape != mask.shape or logits.ndim != 2:
        raise DataError(f"{path}: logits {logits.shape} and prefix_mask {mask.shape} must both be [N, gamma].")
    if (np.diff(mask.astype(int), axis=1) > 0).any():
        raise DataError(
            f"{path}: prefix_mask rises along a row; k+1 drafts cannot pass where k did not. Mislabelled pairs?"
        )
    count = len(logits)
    return Observations(logits, mask.sum(1), np.full(count, logits.shape[1]), np.arange(count))
