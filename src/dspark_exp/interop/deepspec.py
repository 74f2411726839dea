"""Drafters in the layout of the released checkpoints: config.json + safetensors (reference layout of INTEROP).

In: a folder or hub id and a target. Out: a drafter on that target, or files. A missing or unexpected tensor is an
error that names it, never a random weight. Layer ids are 0-based decoder layers, as ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dspark_exp.drafters import BlockDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter
from dspark_exp.errors import CheckpointError
from dspark_exp.targets import Target

_BACKBONE = ("fc.", "hidden_norm.", "norm.", "layers.")
_SHARED = ("embed_tokens.weight", "lm_head.weight")  # may be in the file or borrowed from the target
_HEAD_NAMES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
_SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True)
class DeepSpecConfig:
    """What config.json says about a drafter, in our words."""

    kind: str  # dflash | dspark | eagle3
    num_layers: int
    block_size: int
    layer_ids: tuple[int, ...]
    intermediate_size: int
    mask_token_id: int | None = None
    head: str | None = None
    head_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = True


def read_config(location: str | Path) -> DeepSpecConfig:
    """Parse a checkpoint's config.json.

    Raises:
        CheckpointError: no such file, an unknown architecture, a missing field, or an unknown head.
    """
    raw = _read_json(_resolve(location) / "config.json")
    architecture = (raw.get("architectures") or ["none"])[0]
    try:
        if architecture.endswith("Eagle3Model"):
            return DeepSpecConfig(
                "eagle3", 1, int(raw["ttt_length"]), tuple(raw["target_layer_ids"]), int(raw["intermediate_size"])
            )
        if architecture != "Qwen3DSparkModel":
            raise CheckpointError(
                f"{location}: architecture {architecture!r} is not one that can be read; supported are "
                "Qwen3DSparkModel and Qwen3Eagle3Model."
            )
        rank = int(raw["markov_rank"])
        head = _HEAD_NAMES[raw.get("markov_head_type") or "vanilla"] if rank > 0 else None
        return DeepSpecConfig(
            kind="dspark" if rank > 0 else "dflash",
            num_layers=int(raw["num_hidden_layers"]),
            block_size=int(raw["block_size"]),
            layer_ids=tuple(raw["target_layer_ids"]),
            intermediate_size=int(raw["intermediate_size"]),
            mask_token_id=int(raw["mask_token_id"]),
            head=head,
            head_rank=rank,
            confidence_head=bool(raw.get("enable_confidence_head", False)),
            confidence_with_markov=bool(raw.get("confidence_head_with_markov", True)),
        )
    except KeyError as error:
        raise CheckpointError(f"{location}/config.json lacks or does not know {error}.") from error


def read_drafter(location: str | Path, target: Target) -> nn.Module:
    """A drafter with the checkpoint's weights on ``target``.

    Raises:
        CheckpointError: unreadable files, a tensor missing, unexpected or of the wrong shape, another embedding or LM
            head than the target's, or layers and mask that are not the target's.
    """
    config = read_config(location)
    _check_target(config, target, location)
    drafter = _build(config, target)
    weights = _read_weights(_resolve(location))
    _check_shared(weights, target, location)
    wanted = drafter.state_dict()
    found = {_our_name(name, config.kind): tensor for name, tensor in weights.items() if name not in _SHARED}
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [n for n in wanted.keys() & found.keys() if wanted[n].shape != found[n].shape]
    for label, names in (("lacks", missing), ("has the unexpected", unexpected), ("has another shape for", shapes)):
        if names:
            raise CheckpointError(f"{location} {label} tensor {', '.join(names)}.")
    drafter.load_state_dict({name: tensor.float() for name, tensor in found.items()}, strict=True)
    return drafter.to(target.device)


def write_drafter(
    drafter: nn.Module, target: Target, folder: str | Path, *, dtype: torch.dtype, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write config.json and weights, embedding and LM head included, sharded where they exceed ``shard_bytes``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config_json(drafter, target, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    head = target.head
    tensors = {name.removeprefix("backbone."): tensor for name, tensor in drafter.state_dict().items()}
    tensors |= {"embed_tokens.weight": head.embedding.weight, "lm_head.weight": head.lm_head.weight}
    # clones: tied embeddings share memory, which safetensors refuses
    ready = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    _write_sharded(ready, folder, shard_bytes)


def _build(config: DeepSpecConfig, target: Target) -> nn.Module:
    facts, head = target.facts, target.head
    if config.kind == "eagle3":
        return Eagle3Drafter(facts, head, config.block_size, config.intermediate_size)
    cls: type[BlockDrafter] = DFlashDrafter if config.head is None else DSparkDrafter
    return cls(
        facts,
        head,
        config.num_layers,
        config.block_size,
        head=config.head,
        head_rank=config.head_rank,
        confidence_head=config.confidence_head,
        confidence_with_markov=config.confidence_with_markov,
        intermediate_size=config.intermediate_size,
    )


def _check_target(config: DeepSpecConfig, target: Target, location: str | Path) -> None:
    facts = target.facts
    if config.layer_ids != facts.layer_ids:
        raise CheckpointError(
            f"{location} reads target layers {list(config.layer_ids)}, the target gives {list(facts.layer_ids)}: "
            f"set target.layer_ids={list(config.layer_ids)}."
        )
    if config.mask_token_id is not None and config.mask_token_id != facts.mask_token_id:
        raise CheckpointError(
            f"{location} uses mask id {config.mask_token_id}, the target {facts.mask_token_id}: "
            f"set target.mask_token_id={config.mask_token_id}."
        )


def _check_shared(weights: dict[str, Tensor], target: Target, location: str | Path) -> None:
    """A drafter trained over another embedding or head than the target's would draft nonsense without any error."""
    own = {"embed_tokens.weight": target.head.embedding.weight, "lm_head.weight": target.head.lm_head.weight}
    for name, tensor in own.items():
        if name not in weights:
            continue
        stored = weights[name].to(tensor.device)
        if stored.shape != tensor.shape or not torch.allclose(stored.float(), tensor.float(), atol=1e-2, rtol=1e-2):
            raise CheckpointError(f"{location}: {name} is not the target's; was it trained for another target?")


def _config_json(drafter: nn.Module, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    facts = target.facts
    config = target.model.config.to_dict() | {
        "model_type": "qwen3",
        "num_hidden_layers": drafter.num_layers,
        "num_target_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "intermediate_size": drafter.geometry.intermediate_size,  # type: ignore[union-attr]
        "target_layer_ids": list(facts.layer_ids),
        "layer_types": ["full_attention"] * int(drafter.num_layers),  # type: ignore[arg-type]
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if isinstance(drafter, Eagle3Drafter):
        return config | {
            "architectures": ["Qwen3Eagle3Model"],
            "ttt_length": drafter.block_size,
            "draft_num_hidden_layers": 1,
        }
    assert isinstance(drafter, BlockDrafter)
    head = drafter.markov_head
    names: dict[str | None, str] = {ours: theirs for theirs, ours in _HEAD_NAMES.items()}
    return config | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "markov_rank": head.rank if head is not None else 0,
        "enable_confidence_head": drafter.confidence_head is not None,
        **({"markov_head_type": names[drafter.head_kind]} if head is not None else {}),
        **({"confidence_head_with_markov": drafter.confidence_reads_markov} if drafter.confidence_head else {}),
    }


def _our_name(name: str, kind: str) -> str:
    return f"backbone.{name}" if kind != "eagle3" and name.startswith(_BACKBONE) else name


def _resolve(location: str | Path) -> Path:
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


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from one file or the shards its index names."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {folder / name}: {error}") from error
    return weights


def _write_sharded(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error
