"""Recipe: ``target.shard=auto``, a target held whole where its job fits the device, else spread over the ranks.

In: a config and the memory that is free. Out: the config with the way to hold the target, the same on every rank.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from dspark_exp.errors import TargetError
from dspark_exp.launch import gathered, rank
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target, parts_allowed
from dspark_exp.tasks.building import device_of, devices_of, ranks_of
from dspark_exp.tasks.estimate import estimate, free_gb, measure_rows, on_meta

log = logging.getLogger(__name__)
_SPARE = 0.8  # share of the free memory that an estimate may ask for: it is an estimate


def with_shard_chosen(config: ExperimentConfig) -> ExperimentConfig:
    """The config, ``target.shard=auto`` replaced by what the least free device of its ranks allows.

    In a rank, the same for all of them; before there are ranks, by what is free here.

    Raises:
        DataError: rows cannot be rendered, so that nothing can be estimated.
    """
    if config.target.shard != "auto":
        return config
    if ranks_of(config) == 1:
        return with_shard(config, None)
    free = min(gathered([_free_gb_a_rank(config)]))
    return with_shard(config, gathered([choose_shard(config, free) if rank() == 0 else None])[0])


def with_shard(config: ExperimentConfig, shard: str | None) -> ExperimentConfig:
    """The config with its target held so."""
    return replace(config, target=replace(config.target, shard=shard))


def choose_shard(config: ExperimentConfig, free_gb: float) -> str | None:
    """The first of whole (None), ``tensor_parallel`` and ``fsdp`` whose estimate fits; where none does, the smallest.

    Args:
        free_gb: gigabytes for one rank.
    """
    target, drafter = on_meta(config)
    rows = measure_rows(config)

    def memory_gb(shard: str | None) -> float:
        held = with_shard(config, shard)
        return estimate(held, config.features.mode, target, drafter, rows, 1.0, math.inf, math.inf).memory_gb

    needed = {shard: memory_gb(shard) for shard in _possible(target, ranks_of(config))}
    fitting = [shard for shard, wanted in needed.items() if wanted <= _SPARE * free_gb]
    chosen = fitting[0] if fitting else min(needed, key=lambda shard: needed[shard])
    found = ", ".join(f"{shard or 'whole'} {wanted:.1f} GB" for shard, wanted in needed.items())
    say = log.info if fitting else log.warning
    say("target.shard=auto: %s (%.1f GB free for a rank; estimated: %s)", chosen or "whole", free_gb, found)
    return chosen


def _possible(target: Target, ranks: int) -> list[str | None]:
    try:
        parts = parts_allowed(target.body, [heads for heads, _ in target.facts.layer_kv])
    except TargetError:
        parts = []
    return [None, "tensor_parallel", "fsdp"] if ranks in parts else [None, "fsdp"]


def _free_gb_a_rank(config: ExperimentConfig) -> float:
    _, memory = free_gb(config)
    return memory if device_of(config.trainer.accelerator) == "cuda" else memory / devices_of(config)
