"""Drafters in the layout of the released checkpoints: config.json + safetensors (the reference's layout).

In: a folder or hub id and a target. Out: a drafter on that target. A missing or unexpected tensor is an error that
names it, never a random weight. Layer ids are 0-based decoder layers, as ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark_exp.drafters import BlockDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter
from dspark_exp.errors import CheckpointError
from dspark_exp.interop.checkpoint_files import read_json, read_tensors, resolve
from dspark_exp.interop.layouts import HEAD_NAMES, SHARED
from dspark_exp.targets import Target

_BACKBONE = ("fc.", "hidden_norm.", "norm.", "layers.")
_OUR_HEADS = {theirs: ours for ours, theirs in HEAD_NAMES.items()}
_BODIES = {"Qwen3": "qwen3", "Gemma4": "gemma4"}


@dataclass(frozen=True)
class DeepSpecConfig:
    """What config.json says about a drafter, in our words."""

    kind: str  # dflash | dspark | eagle3
    body: str  # qwen3 | gemma4
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
    raw = read_json(resolve(location) / "config.json")
    architecture = str((raw.get("architectures") or ["none"])[0])
    body = next((ours for theirs, ours in _BODIES.items() if architecture.startswith(theirs)), None)
    kind = architecture.removeprefix("Qwen3").removeprefix("Gemma4")
    if body is None or kind not in ("DSparkModel", "Eagle3Model"):
        names = [f"{family}{model}" for family in _BODIES for model in ("DSparkModel", "Eagle3Model")]
        raise CheckpointError(f"{location}: architecture {architecture!r} cannot be read; supported: {names}.")
    try:
        return _parsed(raw, body, kind == "Eagle3Model")
    except KeyError as error:
        raise CheckpointError(f"{location}/config.json lacks or does not know {error}.") from error


def _parsed(raw: dict[str, Any], body: str, is_eagle: bool) -> DeepSpecConfig:
    ids, width = tuple(raw["target_layer_ids"]), int(raw["intermediate_size"])
    if is_eagle:
        return DeepSpecConfig("eagle3", body, 1, int(raw["ttt_length"]), ids, width)
    rank = int(raw["markov_rank"])
    return DeepSpecConfig(
        kind="dspark" if rank > 0 else "dflash",
        body=body,
        num_layers=int(raw["num_hidden_layers"]),
        block_size=int(raw["block_size"]),
        layer_ids=ids,
        intermediate_size=width,
        mask_token_id=int(raw["mask_token_id"]),
        head=_OUR_HEADS[raw.get("markov_head_type") or "vanilla"] if rank > 0 else None,
        head_rank=rank,
        confidence_head=bool(raw.get("enable_confidence_head", False)),
        confidence_with_markov=bool(raw.get("confidence_head_with_markov", True)),
    )


def read_drafter(location: str | Path, target: Target) -> nn.Module:
    """A drafter with the checkpoint's weights on ``target``.

    Raises:
        CheckpointError: unreadable files, a tensor missing, unexpected or of the wrong shape, another embedding or LM
            head than the target's, or layers, mask and layer style that are not the target's.
    """
    config = read_config(location)
    _check_target(config, target, location)
    drafter = _build(config, target)
    _fill(drafter, config, location, target)
    return drafter.to(target.device)


def load_weights(drafter: nn.Module, location: str | Path, target: Target) -> None:
    """Fill a drafter of the checkpoint's own shape; see ``read_drafter`` for what is refused."""
    config = read_config(location)
    _check_target(config, target, location)
    _fill(drafter, config, location, target)


def _fill(drafter: nn.Module, config: DeepSpecConfig, location: str | Path, target: Target) -> None:
    weights = read_tensors(resolve(location))
    _check_shared(weights, target, location)
    wanted = drafter.state_dict()
    found = {_our_name(name, config.kind): tensor for name, tensor in weights.items() if name not in SHARED}
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [n for n in sorted(wanted.keys() & found.keys()) if wanted[n].shape != found[n].shape]
    for label, names in (("lacks", missing), ("has the unexpected", unexpected), ("has another shape for", shapes)):
        if names:
            raise CheckpointError(f"{location} {label} tensor {', '.join(names)}.")
    drafter.load_state_dict({name: tensor.float() for name, tensor in found.items()}, strict=True)


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
    if config.body != facts.body:
        raise CheckpointError(f"{location} has {config.body} layers; drafters of this target have {facts.body} layers.")
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


def _our_name(name: str, kind: str) -> str:
    return f"backbone.{name}" if kind != "eagle3" and name.startswith(_BACKBONE) else name
