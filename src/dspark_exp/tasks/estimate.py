"""Recipe: disk, memory and hours of a config before any work, by feature mode, beside what this machine has.

Weights are counted on the meta device, so nothing is downloaded but configs and the tokenizer. Sizes on disk are exact
for given replies and upper bounds for replies yet to be generated; memory and time are estimates.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from dspark_exp.data.feature_store import DTYPES
from dspark_exp.data.rendering import render_conversation, render_prompt
from dspark_exp.data.sources import Conversation
from dspark_exp.errors import ConfigError, DataError
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import (
    Target,
    VocabSpec,
    location_of,
    read_architecture,
    read_target_config,
    read_tokenizer,
    resolve_layer_ids,
    target_of,
)
from dspark_exp.tasks.building import build_drafter, device_of, precision_of, ranks_of
from dspark_exp.tasks.prepare_data import conversations_of

_GB = 1e9
_SAMPLE = 200  # rows rendered to learn their length
_UTILISATION = 0.35  # share of a plain matrix product's speed that training reaches
_LOSS_BYTES = 300e6  # logits of one chunk, widened
_MODES = ("stored", "bounded", "online")


@dataclass(frozen=True)
class Rows:
    """How much text there is. ``exact`` is false where replies are yet to be generated: lengths are upper bounds."""

    count: int
    mean_tokens: float
    longest: int
    exact: bool


@dataclass(frozen=True)
class Estimate:
    """One feature mode: gigabytes and hours, and the part of them that the target's features take."""

    mode: str
    disk_gb: float
    memory_gb: float
    hours: float
    fits: bool
    features_gb: float
    features_hours: float


def run_estimate(config: ExperimentConfig) -> None:
    """Print the estimate of each mode; write it to ``<paths.outputs>/estimate.json``."""
    target, drafter = on_meta(config)
    rows = measure_rows(config)
    speed = matmul_flops(device_of(config.trainer.accelerator), precision_of(config))
    free_disk, free_memory = free_gb(config)
    estimates = [estimate(config, mode, target, drafter, rows, speed, free_disk, free_memory) for mode in _MODES]
    console = Console()
    count = f"{rows.count:,} rows, {'' if rows.exact else 'at most '}{rows.mean_tokens:,.0f} tokens each on average"
    table = Table("features", "disk", "memory", "hours", "fits", title=f"{config.drafter.name} on {config.target.name}")
    for item in estimates:
        chosen = " (chosen)" if item.mode == config.features.mode else ""
        cells = (
            f"{item.disk_gb:.2f} GB",
            f"{item.memory_gb:.2f} GB",
            f"{item.hours:.2f}",
            "yes" if item.fits else "NO",
        )
        table.add_row(item.mode + chosen, *cells, style="" if item.fits else "red")
    table.add_section()
    table.add_row("this machine", f"{free_disk:.2f} GB free", f"{free_memory:.2f} GB free", "", "")
    console.print(count)
    console.print(table)
    console.print(
        f"Target {parameters(target.model) / 1e6:,.1f}M parameters, drafter "
        f"{parameters(drafter) / 1e6:,.1f}M to train; a plain matrix product runs at {speed / 1e12:.2f} TFLOP/s here. "
        "Memory and hours are estimates (within about a factor of two); evaluation is not included."
    )
    path = Path(config.paths.outputs) / "estimate.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": asdict(rows), "modes": [asdict(item) for item in estimates]}, indent=1))


def chosen_estimate(config: ExperimentConfig) -> Estimate:
    """The estimate of the feature mode that the config chooses."""
    target, drafter = on_meta(config)
    speed = matmul_flops(device_of(config.trainer.accelerator), precision_of(config))
    return estimate(config, config.features.mode, target, drafter, measure_rows(config), speed, *free_gb(config))


def on_meta(config: ExperimentConfig) -> tuple[Target, nn.Module]:
    """Target and drafter without memory: their shapes alone."""
    wanted = config.target
    model_config = read_target_config(location_of(wanted.path))
    architecture = read_architecture(model_config)
    ids = resolve_layer_ids(wanted.layer_ids, architecture.num_layers, wanted.num_feature_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
        rows = model.get_input_embeddings().weight.shape[0]
        vocabulary = VocabSpec(rows, rows, rows, mask_id=wanted.mask_token_id or 0, pad_id=1, stop_ids=(rows - 1,))
        target = target_of(wanted.name, model, None, layer_ids=ids, vocabulary=vocabulary, revision="")
        unloaded = replace(config, drafter=replace(config.drafter, init_from=None))  # shapes alone, no weights
        drafter = build_drafter(unloaded, target)
    return target, drafter


def measure_rows(config: ExperimentConfig) -> Rows:
    """Lengths of a sample of rows as training would render them.

    Raises:
        DataError: none of the sampled rows can be rendered.
    """
    tokenizer, stop_ids = read_tokenizer(config.target.path)
    train, _, _ = conversations_of(config)
    sample = random.Random(0).sample(train, min(_SAMPLE, len(train)))
    exact = all(item.has_reply for item in train)
    lengths = [n for item in sample for n in _lengths(config, item, tokenizer, stop_ids)]
    if not lengths:
        raise DataError("None of the sampled rows can be rendered; look at them with task=inspect_data.")
    lengths = [min(length, config.data.max_length) for length in lengths]
    rows = round(len(train) * len(lengths) / len(sample))
    return Rows(rows, sum(lengths) / len(lengths), max(lengths), exact)


def _lengths(config: ExperimentConfig, item: Conversation, tokenizer: Any, stop_ids: tuple[int, ...]) -> list[int]:
    thinking = config.target.thinking
    if not item.has_reply:
        turns = sum(message["role"] == "user" for message in item.messages)
        return [len(render_prompt(tokenizer, item.prompts.messages, thinking)) + turns * config.data.max_new_tokens]
    try:
        return [
            len(row.input_ids) for row in render_conversation(tokenizer, item.messages, stop_ids, thinking=thinking)
        ]
    except DataError:
        return []  # such a row is dropped by training, too


def estimate(
    config: ExperimentConfig,
    mode: str,
    target: Target,
    drafter: nn.Module,
    rows: Rows,
    speed: float,
    free_disk: float,
    free_memory: float,
) -> Estimate:
    """Gigabytes and hours of one mode; ``speed`` in FLOP/s, what is free in gigabytes."""
    features = rows.count * rows.mean_tokens * _feature_bytes(config, target) / _GB
    disk = {"stored": features, "bounded": min(features, config.features.max_gb or features), "online": 0.0}[mode]
    checkpoints = 2 * 12 * parameters(drafter) / _GB  # best and last: weights and two moments in float32
    memory = _memory_bytes(config, target, drafter, rows) / _GB
    an_hour = speed * _UTILISATION * 3600
    features_hours = _target_flops(config, target, rows, mode) / an_hour
    hours = _drafter_flops(config, target, drafter, rows) / an_hour + features_hours
    fits = disk + checkpoints <= free_disk and memory <= free_memory
    return Estimate(mode, disk + checkpoints, memory, hours, fits, disk, features_hours)


def parameters(module: nn.Module) -> int:
    """Distinct parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def _feature_bytes(config: ExperimentConfig, target: Target) -> int:
    """Bytes a token in the store: m tapped layers and the final state, token id, supervision mark."""
    width = (len(target.facts.layer_ids) + 1) * target.facts.hidden_size
    return width * _itemsize(config.features.dtype) + 5


def _memory_bytes(config: ExperimentConfig, target: Target, drafter: nn.Module, rows: Rows) -> float:
    """Weights, gradients, moments, activations of one batch, and the decoding caches of validation."""
    facts, trainer, data = target.facts, config.trainer, config.data
    weights = _target_bytes(config, target) + _drafter_bytes(config, drafter)
    tokens = trainer.batch_size * rows.longest
    slots = _slots(config, drafter, rows)
    kv = 2 * facts.num_kv_heads * facts.head_dim
    intermediate = drafter.geometry.intermediate_size  # type: ignore[union-attr]
    layers = int(drafter.num_layers)  # type: ignore[arg-type]
    activations = layers * 4 * (tokens * kv + slots * (10 * facts.hidden_size + 4 * int(intermediate)))  # type: ignore[arg-type]
    batch = tokens * _feature_bytes(config, target)
    length = rows.longest + data.validation_max_new_tokens
    cache = config.evaluation.batch_size * length * sum(2 * heads * width for heads, width in facts.layer_kv) * 4
    probs = 4 * config.evaluation.batch_size * (int(drafter.block_size) + 1) * facts.vocab_size * 4  # type: ignore[arg-type]
    return weights + batch + activations + _LOSS_BYTES + cache + probs


def _target_bytes(config: ExperimentConfig, target: Target) -> float:
    """Weights; of a sharded target what is whole everywhere, a share of the layers, and of fsdp's two gathered ones."""
    whole, layers = parameters(target.model), parameters(target.body.layers)
    held: float = whole
    if config.target.shard in ("fsdp", "tensor_parallel"):
        gathered = 2 / len(target.body.layers) if config.target.shard == "fsdp" else 0.0
        held = whole - layers + layers * (1 / ranks_of(config) + gathered)
    return held * _itemsize(config.target.dtype)


def _drafter_bytes(config: ExperimentConfig, drafter: nn.Module) -> float:
    """Weights, gradients and two moments in float32. Sharded: a share of them; beside it what a step gathers (a layer
    and what is outside of layers, with its gradients), or, while drafting, the weights of all."""
    whole, ranks = parameters(drafter), ranks_of(config)
    if config.trainer.strategy != "fsdp" or ranks == 1:
        return 16 * whole
    alone = [parameters(layer) for layer in drafter.layers_alone()]  # type: ignore[operator]
    gathered = whole - sum(alone) + max(alone, default=0)
    return 16 * whole / ranks + max(8 * gathered, 4 * whole)


def _slots(config: ExperimentConfig, drafter: nn.Module, rows: Rows) -> float:
    """Predicted tokens of one batch."""
    gamma = int(drafter.block_size)  # type: ignore[arg-type]
    if drafter.autoregressive:
        return config.trainer.batch_size * rows.mean_tokens * gamma
    return config.trainer.batch_size * config.trainer.num_anchors * gamma


def _drafter_flops(config: ExperimentConfig, target: Target, drafter: nn.Module, rows: Rows) -> float:
    """Training of the drafter from features."""
    facts, trainer = target.facts, config.trainer
    slots = _slots(config, drafter, rows)
    body = sum(p.numel() for name, p in drafter.named_parameters() if p.ndim == 2 and "markov" not in name)
    head = facts.vocab_size * facts.hidden_size
    rank = getattr(getattr(drafter, "markov_head", None), "rank", 0)
    context = trainer.batch_size * rows.mean_tokens
    # a product costs 2 forward and 4 backward; the frozen head has no weight gradient, and the target's logits none
    per_batch = (
        6 * body * slots + 4 * head * slots + 2 * head * min(slots, context) + 6 * facts.vocab_size * rank * slots
    )
    per_batch += 6 * context * facts.hidden_size * facts.hidden_size * len(facts.layer_ids)
    return trainer.max_steps * trainer.accumulate * per_batch


def _target_flops(config: ExperimentConfig, target: Target, rows: Rows, mode: str) -> float:
    """The target's features; regeneration of replies is bound by memory traffic and not included."""
    online = config.trainer.max_steps * config.trainer.accumulate * config.trainer.batch_size
    seen: float = {"stored": -(-rows.count // ranks_of(config)), "online": online}.get(mode, rows.count)  # ranks share
    if mode == "bounded":
        stored = rows.count * rows.mean_tokens * _feature_bytes(config, target) / _GB
        kept = min(1.0, (config.features.max_gb or stored) / max(stored, 1e-9))
        seen += round((1 - kept) * max(0, online - rows.count))
    return 2 * parameters(target.model) * seen * rows.mean_tokens


def matmul_flops(device: str, precision: str) -> float:
    """FLOP/s of a plain matrix product in the training dtype, measured for a fraction of a second."""
    dtype = torch.bfloat16 if "bf16" in precision else torch.float32
    size = 1024 if device == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=dtype)
    rounds, seconds = 0, 0.0
    a @ a
    started = time.perf_counter()
    while seconds < 0.3:
        b = a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        rounds, seconds = rounds + 1, time.perf_counter() - started
    del b
    return 2.0 * size**3 * rounds / seconds


def free_gb(config: ExperimentConfig) -> tuple[float, float]:
    """Free disk where the cache goes, and free memory of the device that trains."""
    cache = Path(config.paths.cache).absolute()
    place = next(parent for parent in (cache, *cache.parents) if parent.exists())
    disk = shutil.disk_usage(place).free / _GB
    if device_of(config.trainer.accelerator) == "cuda":
        return disk, torch.cuda.mem_get_info()[0] / _GB
    return disk, psutil.virtual_memory().available / _GB


def _itemsize(dtype: str) -> int:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; choose from {', '.join(DTYPES)}.")
    return DTYPES[dtype].itemsize
