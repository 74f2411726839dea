"""From the composed Hydra config to the dataclasses of ``schema.py``, validated once, at the edge; names of jobs.

Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspark_exp.errors import ConfigError
from dspark_exp.schema import ExperimentConfig

_NOT_NUMBERS = (
    "paths", "tracking", "experiment", "name", "task", "tiny_target", "export", "inspect", "checkpoint", "scheduling",
    "profile", "serving", "load", "sweep",
)  # fmt: skip


def conf_folder() -> Path:
    """The config groups: inside the installed package, or at the top of the repository."""
    here = Path(__file__).parent
    return here / "conf" if (here / "conf").is_dir() else here.parents[1] / "conf"


def register_sweeps() -> None:
    """Make every file of ``sweeps/`` a choice of ``+sweeps=NAME``, in the repository and in an installed package."""
    conf = conf_folder()
    for path in sorted((conf.parent / "sweeps").glob("*.yaml")):
        ConfigStore.instance().store(path.stem, OmegaConf.load(path), "sweeps", "_global_", str(path))


def validated(composed: DictConfig) -> ExperimentConfig:
    """The composed config as dataclasses.

    Raises:
        ConfigError: an unknown, missing or wrongly typed option; the message names it.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), composed)
        OmegaConf.resolve(merged)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ConfigError(f"Required options have no value: {', '.join(sorted(missing))}.")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_sentence(error)) from error
    assert isinstance(config, ExperimentConfig)
    _check_ranges(config)
    _check_choices(config)
    _check_together(config)
    config.experiment = filed_under(config)
    return config


def filed_under(config: ExperimentConfig | DictConfig) -> str | None:
    """Name of reports and of the MLflow parent run: the user's own, or the experiment file's; None without one."""
    return config.name or config.experiment


def resolved_dict(composed: DictConfig) -> dict[str, Any]:
    """Plain nested dicts with every interpolation resolved."""
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def job_key(plain: dict[str, Any]) -> str:
    """Hash of everything in a resolved config that can change a number."""
    relevant = {key: value for key, value in plain.items() if key not in _NOT_NUMBERS}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:10]


def flattened(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _one_sentence(error: OmegaConfBaseException) -> str:
    key = getattr(error, "full_key", "") or ""
    text = str(error).splitlines()[0]
    if "not in" in text and key:
        return f"Unknown option {key!r}. Run with --help for the groups, or --cfg job to see every option."
    return f"Option {key!r}: {text}" if key else text


def _check_ranges(config: ExperimentConfig) -> None:
    at_least_one = {
        "data.max_length": config.data.max_length,
        "data.max_new_tokens": config.data.max_new_tokens,
        "data.num_validation": config.data.num_validation,
        "trainer.batch_size": config.trainer.batch_size,
        "trainer.num_anchors": config.trainer.num_anchors,
        "trainer.accumulate": config.trainer.accumulate,
        "trainer.num_nodes": config.trainer.num_nodes,
        "trainer.validate_every_steps": config.trainer.validate_every_steps,
        "benchmark.num_prompts": config.benchmark.num_prompts,
        "benchmark.max_new_tokens": config.benchmark.max_new_tokens,
        "evaluation.batch_size": config.evaluation.batch_size,
        "inspect.num_rows": config.inspect.num_rows,
        "profile.max_tokens": config.profile.max_tokens,
        "profile.max_requests": config.profile.max_requests,
        "serving.max_requests": config.serving.max_requests,
        "serving.max_length": config.serving.max_length,
        "serving.max_queue": config.serving.max_queue,
        "load.requests_per_user": config.load.requests_per_user,
        "load.min_requests": config.load.min_requests,
        "load.repeats": config.load.repeats,
        "load.concurrency": min(config.load.concurrency, default=0),
        "profile.repeats": config.profile.repeats,
        "data.server_concurrency": config.data.server_concurrency,
    }
    if config.sweep.prune_after is not None:
        at_least_one["sweep.prune_after"] = config.sweep.prune_after
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: expected at least 1.")
    if config.trainer.max_steps < 0:
        raise ConfigError(f"trainer.max_steps={config.trainer.max_steps}: expected at least 0.")
    if config.load.slice_s is not None and config.load.slice_s <= 0:
        raise ConfigError(f"load.slice_s={config.load.slice_s}: expected seconds above 0, or null.")
    if not config.load.rates or min(config.load.rates) <= 0:
        raise ConfigError(f"load.rates={config.load.rates}: expected shares of what plain decoding serves, above 0.")
    if config.evaluation.packed_gb < 0:
        raise ConfigError(f"evaluation.packed_gb={config.evaluation.packed_gb}: expected gigabytes, 0 for none.")
    if not 0 <= config.data.max_dropped <= 1:
        raise ConfigError(f"data.max_dropped={config.data.max_dropped}: expected a share from 0 to 1.")


def _check_choices(config: ExperimentConfig) -> None:
    choices = {
        "data.source": (config.data.source, ("language", "jsonl", "hub")),
        "data.replies": (config.data.replies, ("keep", "regenerate")),
        "evaluation.attention": (config.evaluation.attention, ("auto", "sdpa", "flex")),
        "features.mode": (config.features.mode, ("stored", "online", "bounded")),
        "target.shard": (config.target.shard, (None, "fsdp", "tensor_parallel", "auto")),
        "trainer.strategy": (config.trainer.strategy, ("ddp", "fsdp")),
        "benchmark.source": (config.benchmark.source, ("language", "prompts")),
    }
    choices |= {f"load.arrivals[{i}]": (kind, ("poisson", "bursty")) for i, kind in enumerate(config.load.arrivals)}
    for name, (chosen, allowed) in choices.items():
        if chosen not in allowed:
            raise ConfigError(f"{name}={chosen!r} is unknown; choose from {', '.join(map(str, allowed))}.")


def _check_together(config: ExperimentConfig) -> None:
    if config.name is not None and not re.fullmatch(r"\w[\w.-]*", config.name):
        raise ConfigError(f"name={config.name!r} names a folder of reports: letters, digits, _, - and . only.")
    if config.data.source == "jsonl" and not config.data.path:
        raise ConfigError("data.source=jsonl needs data.path=<JSONL file with conversations or turns>.")
    if config.data.source == "hub" and not (config.data.hub or {}).get("id"):
        raise ConfigError("data.source=hub needs data.hub.id=<data set id>.")
    if config.features.mode == "stored" and (config.features.batch_size or 0) < 1:
        raise ConfigError(f"features.batch_size={config.features.batch_size}: expected at least 1.")
    if config.trainer.compile and config.trainer.strategy == "fsdp":
        raise ConfigError("trainer.compile=true compiles a drafter that lies whole on its device: not with fsdp.")
    if config.task == "train_eval" and config.trainer.max_steps == 0 and config.drafter.init_from is None:
        raise ConfigError(
            "trainer.max_steps=0 evaluates a drafter as it is: say which with drafter.init_from=<folder>."
        )
