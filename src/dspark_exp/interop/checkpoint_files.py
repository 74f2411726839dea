"""Checkpoint folders: JSON and safetensors, whole or sharded. Knows nothing about drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_exp.errors import CheckpointError

SHARD_BYTES = 4_000_000_000


def resolve(location: str | Path) -> Path:
    """The folder itself, or the downloaded snapshot of a hub id.

    Raises:
        CheckpointError: neither a folder nor a hub id that can be reached.
    """
    path = Path(location)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # only for hub ids
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(location), allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"No drafter checkpoint at {str(location)!r}: give a folder with config.json or a hub id that this machine "
            "can reach (drafter.init_from=…)."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: unreadable.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from one file or the shards its index names.

    Raises:
        CheckpointError: a file is missing or torn.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {folder / name}: {error}") from error
    return weights


def write_tensors(tensors: dict[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """One file, or numbered shards with an index where the tensors exceed ``shard_bytes``."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
