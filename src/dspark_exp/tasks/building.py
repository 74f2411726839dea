"""From config sections to objects: the only place that knows both option names and constructors."""

from __future__ import annotations

import inspect
import logging
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.utils import get_class
from torch import nn

from dspark_exp.allocator import keep_freed_memory
from dspark_exp.calibration import Calibration
from dspark_exp.contracts import FrozenHead
from dspark_exp.data import language
from dspark_exp.data.benchmarks import BenchmarkSpec, HubSource, Prompt, benchmark_prompts, synthetic_prompts
from dspark_exp.decoding import DecodingBatch, EarlyExit, Sampling, SpeculativeLoop, VerificationPolicy
from dspark_exp.drafters import in_dtype
from dspark_exp.errors import ConfigError
from dspark_exp.interop import load_weights, read_config
from dspark_exp.launch import barrier, before_meeting, num_ranks, rank
from dspark_exp.onednn import pack_linears
from dspark_exp.scheduling import CapacityTable, read_table
from dspark_exp.schema import ExperimentConfig, SamplingConfig
from dspark_exp.targets import (
    RaggedKVCache,
    Target,
    check_target,
    cut_over_ranks,
    load_target,
    rank_mesh,
    shard_over_ranks,
)

log = logging.getLogger(__name__)
Settings = TypeVar("Settings")


def open_target(config: ExperimentConfig) -> Target:
    """Load the target onto the device that training and decoding will use."""
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    wanted, device = config.target, device_of(config.trainer.accelerator)
    if device == "cpu":
        keep_freed_memory()
    load = partial(
        load_target,
        wanted.name,
        wanted.path,
        dtype=wanted.dtype,
        layer_ids=wanted.layer_ids,
        num_feature_layers=wanted.num_feature_layers,
        mask_token_id=wanted.mask_token_id,
    )
    is_whole = wanted.shard in (None, "auto")  # jobs on ranks have chosen before (``with_shard_chosen``)
    target = load(device=device) if is_whole else _sharded(load, device, str(wanted.shard))
    target.attention = config.evaluation.attention
    if is_whole:
        _pack(config, target.model)
    return target


def _sharded(load: Callable[[], Target], device: str, kind: str) -> Target:
    """Spread a target over the ranks, which load it in turn: the host holds one whole copy at a time.

    Raises:
        ConfigError: there is one rank alone.
    """
    if num_ranks() == 1:
        raise ConfigError(
            f"target.shard={kind} spreads the target over the ranks of a training job: set trainer.devices (or "
            "trainer.num_nodes) above 1, or target.shard=null. Other tasks run in one process, which needs all of it."
        )
    spread = {"fsdp": shard_over_ranks, "tensor_parallel": cut_over_ranks}[kind]
    mesh, target = rank_mesh(device), None
    for turn in range(num_ranks()):
        if turn == rank():
            target = load()
            if turn == 0:
                check_target(target)
            target = spread(target, mesh)
        barrier()
    assert target is not None
    before_meeting(target.catch_up)
    return target


def device_of(accelerator: str) -> str:
    """The torch device behind a Lightning accelerator name."""
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
    if accelerator not in known:
        raise ConfigError(f"trainer.accelerator={accelerator!r} is unknown; choose from auto, {', '.join(known)}.")
    return known[accelerator]


def devices_of(config: ExperimentConfig) -> int:
    """Ranks on this machine.

    Raises:
        ConfigError: not a number of at least 1, or more GPUs than there are.
    """
    wanted, on_gpu = config.trainer.devices, device_of(config.trainer.accelerator) == "cuda"
    if wanted == "auto":
        return torch.cuda.device_count() if on_gpu else 1
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ConfigError(f"trainer.devices={wanted!r}: expected a number of at least 1, or auto.")
    if on_gpu and wanted > torch.cuda.device_count():
        raise ConfigError(f"trainer.devices={wanted}: this machine has {torch.cuda.device_count()} GPUs.")
    return wanted


def ranks_of(config: ExperimentConfig) -> int:
    """Ranks of a job, over all machines."""
    return devices_of(config) * config.trainer.num_nodes


def precision_of(config: ExperimentConfig) -> str:
    """``auto`` is bf16-mixed on a GPU and float32 on a CPU."""
    if config.trainer.precision != "auto":
        return config.trainer.precision
    return "bf16-mixed" if device_of(config.trainer.accelerator) == "cuda" else "32-true"


def construct(spec: dict[str, Any], where: str, *args: Any) -> Any:
    """Call ``spec["_target_"]`` with its other keys.

    Raises:
        ConfigError: no such class, or a key that its signature does not know.
    """
    settings = {key: value for key, value in spec.items() if key != "_target_"}
    try:
        cls = get_class(spec["_target_"])
    except Exception as error:
        raise ConfigError(f"{where}._target_={spec.get('_target_')!r} names no class.") from error
    known = [name for name in inspect.signature(cls).parameters if name not in ("facts", "frozen")]
    unknown = [key for key in settings if key not in known]
    if unknown:
        raise ConfigError(f"Unknown option {where}.{unknown[0]}; {cls.__name__} takes {', '.join(known)}.")
    return cls(*args, **settings)


def as_settings(cls: type[Settings], spec: dict[str, Any], where: str) -> Settings:
    """A settings dataclass from a config section.

    Raises:
        ConfigError: a key that it does not know or that is missing.
    """
    try:
        return cls(**spec)
    except TypeError as error:
        known = ", ".join(inspect.signature(cls).parameters)
        raise ConfigError(f"{where} takes {known}; got {', '.join(spec) or 'nothing'}.") from error


def build_drafter(config: ExperimentConfig, target: Target) -> nn.Module:
    """The drafter before training: initialised from the run's seed, or with the weights of ``drafter.init_from``.

    Raises:
        ConfigError: the checkpoint has another shape than ``drafter.network``; the message says what to set.
        CheckpointError: it cannot be read or does not fit this target.
    """
    torch.manual_seed(config.seed)
    head: FrozenHead = target.head
    drafter: nn.Module = construct(config.drafter.network, "drafter.network", target.facts, head)
    location = config.drafter.init_from
    if location is not None:
        _check_shape(drafter, location)
        load_weights(drafter, location, target)
        log.info("Drafter weights from %s", location)
    return drafter.to(target.device)


def _check_shape(drafter: Any, location: str) -> None:
    """Compare a drafter with a checkpoint's config before its tensors are compared one by one."""
    stored = read_config(location)
    if (stored.kind == "eagle3") != drafter.autoregressive:
        raise ConfigError(f"drafter.init_from={location} holds {stored.kind}; choose drafter={stored.kind}.")
    ours: dict[str, Any] = {"block_size": drafter.block_size}
    theirs: dict[str, Any] = {"block_size": stored.block_size}
    if stored.kind != "eagle3":
        head = drafter.markov_head
        ours |= {
            "num_layers": drafter.num_layers,
            "head": drafter.head_kind,
            "head_rank": head.rank if head is not None else 0,
            "confidence_head": drafter.confidence_head is not None,
        }
        theirs |= {name: getattr(stored, name) for name in ours if name != "block_size"}
    changed = [
        f"drafter.network.{name}={theirs[name]} (now {ours[name]})" for name in ours if ours[name] != theirs[name]
    ]
    if changed:
        hint = f" (drafter=dspark_{stored.head} has that head)" if ours.get("head") != theirs.get("head") else ""
        raise ConfigError(f"drafter.init_from={location} has another shape; set {', '.join(changed)}{hint}.")


def build_sampling(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p)


def build_policy(config: ExperimentConfig, target: Target) -> VerificationPolicy:
    """The verification policy; schedulers get the capacity table of ``scheduling.table``.

    Raises:
        ConfigError: an unknown option, or no table of this model and device.
    """
    needs_curve = "curve" in inspect.signature(get_class(config.policy["_target_"])).parameters
    arguments = (read_capacity(config, target).curve(),) if needs_curve else ()
    policy: VerificationPolicy = construct(config.policy, "policy", *arguments)
    return policy


def capacity_path(config: ExperimentConfig) -> Path:
    """Where the capacity table of this target and drafter lies."""
    if config.scheduling.table is not None:
        return Path(config.scheduling.table)
    return Path(config.paths.outputs, "capacity", config.target.name, f"{config.drafter.name}.json")


def read_capacity(config: ExperimentConfig, target: Target) -> CapacityTable:
    """The measured capacity table.

    Raises:
        ConfigError: none there, or one of another model or device without ``scheduling.force``.
    """
    table = read_table(capacity_path(config))
    table.check(identity_of(target), config.scheduling.force)
    return table


def identity_of(target: Target) -> dict[str, Any]:
    """What a capacity table must have been measured on."""
    return {
        "model": target.facts.name,
        "revision": target.revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device_name(target),
    }


def device_name(target: Target) -> str:
    """The device as results name it."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return f"{target.device.type} ({platform.machine()})"


def build_early_exit(config: ExperimentConfig) -> EarlyExit | None:
    """``drafter.early_exit`` as a rule, or None."""
    wanted = config.drafter.early_exit
    return None if wanted is None else as_settings(EarlyExit, wanted, "drafter.early_exit")


def build_loop(
    target: Target,
    drafter: Any,
    sampling: Sampling,
    batch_size: int,
    policy: VerificationPolicy | None = None,
    calibration: Calibration | None = None,
    early_exit: EarlyExit | None = None,
    record_overlap: bool = False,
) -> SpeculativeLoop:
    """A decoding loop whose drafter keeps its keys in the same kind of cache as the target."""
    calibrate = calibration.apply if calibration is not None else None
    make_cache = _cache_maker(target, drafter)
    return SpeculativeLoop(
        target, drafter, make_cache, sampling, policy, batch_size, calibrate, early_exit, record_overlap
    )


def build_batch(
    target: Target,
    drafter: Any,
    sampling: Sampling,
    policy: VerificationPolicy,
    num_rows: int,
    max_length: int,
    calibration: Calibration | None = None,
    early_exit: EarlyExit | None = None,
) -> DecodingBatch:
    """Requests in flight whose drafter keeps its keys in the same kind of cache as the target."""
    calibrate = calibration.apply if calibration is not None else None
    make_cache = _cache_maker(target, drafter)
    return DecodingBatch(target, drafter, make_cache, sampling, policy, num_rows, max_length, calibrate, early_exit)


def _cache_maker(target: Target, drafter: Any) -> Callable[[int, int, int, int, int], RaggedKVCache]:
    """Makes the drafter's key/value rows."""

    def make_cache(layers: int, rows: int, kv_heads: int, max_length: int, head_dim: int) -> RaggedKVCache:
        layer_kv = [(kv_heads, head_dim)] * layers
        return RaggedKVCache(layer_kv, rows, max_length, drafter.dtype, target.device, target.attention)

    return make_cache


def for_decoding(config: ExperimentConfig, target: Target, drafter: Any) -> Any:
    """The drafter in evaluation mode and in the dtype that decoding uses.

    Raises:
        ConfigError: an unknown dtype.
    """
    chosen = config.evaluation.drafter_dtype
    dtypes = {"auto": target.dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if chosen not in dtypes:
        raise ConfigError(f"evaluation.drafter_dtype={chosen!r} is unknown; choose from {', '.join(dtypes)}.")
    decoding = in_dtype(drafter, dtypes[chosen]).eval()
    _pack(config, decoding, decoding.frozen.lm_head)
    return decoding


def _pack(config: ExperimentConfig, *modules: nn.Module) -> None:
    pack_linears(*modules, max_bytes=config.evaluation.packed_gb * 2**30)


def load_benchmarks(config: ExperimentConfig, held_out: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by benchmark. ``held_out``: that many a benchmark which evaluation does not use, for calibration.

    Raises:
        ConfigError: a name that is no benchmark. DataError: prompts are missing.
    """
    wanted = config.benchmark
    specs = {name: _benchmark_spec(spec or {}) for name, spec in wanted.specs.items()}
    if wanted.source == "language":
        specs = {name: BenchmarkSpec(domain) for name, domain in language.BENCHMARKS.items()}
    names = wanted.names if wanted.names is not None else list(specs)
    unknown = [name for name in names if name not in specs]
    if unknown or not names:
        given = ", ".join(unknown) or "none"
        raise ConfigError(f"Unknown benchmark: {given}; benchmark.names may hold {', '.join(specs)}.")
    if wanted.source == "language":
        split, count = ("evaluation", wanted.num_prompts) if held_out is None else ("validation", held_out)
        return synthetic_prompts(names, split, count)
    return benchmark_prompts({name: specs[name] for name in names}, wanted.dir, wanted.num_prompts, held_out)


def _benchmark_spec(spec: dict[str, Any]) -> BenchmarkSpec:
    hub = spec.get("hub")
    return BenchmarkSpec(spec["domain"], HubSource(**hub) if hub else None, spec.get("num_prompts"))


def build_module(config: ExperimentConfig, drafter: nn.Module, **settings: Any) -> Any:
    """The LightningModule of the drafter with its objective."""
    objective = construct(config.drafter.objective, "drafter.objective")
    cls: Callable[..., Any] = get_class(config.drafter.module)
    return cls(drafter, objective=objective, seed=config.seed, num_anchors=config.trainer.num_anchors, **settings)
