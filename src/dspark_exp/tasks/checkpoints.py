"""Training checkpoints of drafters: weights out, calibration in and out. Each is read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dspark_exp.calibration import Calibration
from dspark_exp.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """What came with a drafter's weights."""

    step: int
    calibration: Calibration | None


def load_drafter(path: Path, drafter: nn.Module) -> Loaded:
    """Load a training checkpoint's weights into a drafter.

    Raises:
        CheckpointError: unreadable, or a tensor is missing or unexpected.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = checkpoint["state_dict"]
        prefix = "drafter."
        drafter.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    except (OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"Checkpoint {path} does not fit this drafter: {error}") from error
    found = checkpoint.get("calibration")
    return Loaded(int(checkpoint["global_step"]), None if found is None else Calibration.of_dict(found))


def store_calibration(path: Path, calibration: Calibration) -> None:
    """Put the calibration into a training checkpoint; the file is replaced in one step."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    checkpoint["calibration"] = calibration.as_dict()
    partial = path.with_suffix(".partial")
    torch.save(checkpoint, partial)
    partial.replace(path)
