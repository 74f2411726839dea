"""The schema of an experiment: what every option is called, its type and its unit. Validated once, at the edge.

In: the composed Hydra config. Out: typed dataclasses. Knows nothing about models; below ``tasks`` no config is passed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspark_exp.errors import ConfigError


@dataclass
class SamplingConfig:
    """temperature >= 0 (0 = greedy), top_k >= 0 (0 = off), 0 < top_p <= 1 (1 = off)."""

    temperature: float
    top_k: int
    top_p: float


@dataclass
class DraftDefaults:
    """Drafter sizes that suit a target; drafter files interpolate them."""

    num_layers: int
    head_rank: int
    intermediate_size: int | None


@dataclass
class TargetConfig:
    """The frozen model. ``path``: embedded, a folder, or a hub id."""

    name: str
    path: str
    dtype: str
    layer_ids: list[int] | None
    num_feature_layers: int
    mask_token_id: int | None
    thinking: bool
    sampling: SamplingConfig
    draft: DraftDefaults


@dataclass
class DrafterConfig:
    """A drafter: the network, its objective, and the LightningModule that trains it."""

    name: str
    init_from: str | None  # folder or hub id of a released checkpoint to start from; null = random weights
    network: dict[str, Any]
    objective: dict[str, Any]
    module: str
    early_exit: dict[str, Any] | None = None  # {min_accepted, window, pause}; null = every round drafts


@dataclass
class DataConfig:
    """Training conversations."""

    source: str  # language | jsonl | hub
    path: str | None  # JSONL file for source=jsonl
    hub: dict[str, Any] | None  # {id, split, config, streaming} for source=hub
    domains: dict[str, list[str]]  # domain -> fragments of a row's source field, for source=hub
    replies: str  # keep | regenerate
    num_per_benchmark: int  # prompts per synthetic benchmark for source=language
    max_rows: int | None  # null = all
    max_length: int  # tokens
    max_new_tokens: int  # of a regenerated reply
    num_validation: int  # prompts held out for val/tau
    validation_max_new_tokens: int
    regenerate_batch_size: int
    responses: str | None  # file of regenerated replies; null = named after its settings in paths.cache
    server: str | None  # URL of an OpenAI-compatible server that replies instead of the local target
    server_model: str | None  # null = the first model that the server lists
    server_concurrency: int  # requests in flight
    max_dropped: float  # share of rows that may be dropped before training refuses


@dataclass
class FeaturesConfig:
    """Where target features come from."""

    mode: str  # stored | online | bounded
    dtype: str
    max_gb: float  # gigabytes on disk
    dir: str | None  # null = named after its settings in paths.cache
    batch_size: int | None  # sequences a target forward; only the stored mode chooses it


@dataclass
class TrainerConfig:
    """Budget and optimizer of drafter training."""

    max_steps: int
    batch_size: int  # sequences a batch
    num_anchors: int  # blocks a sequence
    accumulate: int  # batches an optimizer step
    lr: float
    head_lr_scale: float  # learning-rate factor of the sequential and confidence heads
    warmup_ratio: float
    weight_decay: float
    beta2: float
    clip: float  # gradient norm
    objective_ramp: float  # share of training over which CE blends into the drafter's objective; 0 = never
    validate_every_steps: int
    log_every_steps: int
    compile: bool  # torch.compile of the drafter's training pass
    accelerator: str
    devices: Any  # ranks on this machine: a number, or auto = every visible GPU, one process on a CPU
    num_nodes: int  # machines; above 1 the commands to type are printed
    precision: str  # auto | 32-true | bf16-mixed | ...
    num_workers: int
    num_threads: int | None  # CPU threads; null = PyTorch's choice


@dataclass
class BenchmarkConfig:
    """What is evaluated."""

    source: str  # language | prompts
    specs: dict[str, Any]  # name -> {domain, hub, num_prompts}
    names: list[str] | None  # null = all of specs
    dir: str | None  # folder of <name>.jsonl; null = hub
    num_prompts: int
    max_new_tokens: int


@dataclass
class EvaluationConfig:
    """How it is evaluated."""

    sampling: SamplingConfig
    batch_size: int
    drafter_dtype: str  # auto | float32 | bfloat16; auto = the target's
    attention: str  # auto | sdpa | flex; of the ragged caches
    plain_prompts: int  # prompts a benchmark decoded without drafter, for the speed-up
    seed: int


@dataclass
class TrackingConfig:
    """MLflow."""

    enabled: bool
    uri: str
    experiment: str


@dataclass
class ExportConfig:
    """What ``task=export`` writes."""

    to: str  # deepspec | speculators | vllm | sglang
    dir: str | None  # null = export-<to> in the job's folder
    dtype: str  # float32 | bfloat16
    shard_gb: float  # gigabytes a weight file


@dataclass
class InspectConfig:
    """What ``task=inspect_data`` prints."""

    num_rows: int  # rows shown token by token


@dataclass
class SchedulingConfig:
    """Where schedulers find the capacity of this machine."""

    table: str | None  # null = what task=profile_capacity measured for this target and drafter
    force: bool  # take a table of another model or device


@dataclass
class ProfileConfig:
    """What ``task=profile_capacity`` measures."""

    max_tokens: int  # largest forward batch B
    max_requests: int  # in one batch; B is spread over so many
    context_lengths: list[int]  # tokens already in the cache of each request
    repeats: int  # timed passes a point, after one that warms up


@dataclass
class ServingConfig:
    """``task=serve``."""

    host: str
    port: int
    max_requests: int  # in flight
    max_length: int  # tokens of a request: prompt, answer and one block
    max_queue: int  # requests that may wait


@dataclass
class LoadConfig:
    """Load tests: experiments pareto, load_adaptive, staleness, early_exit, calibration_shift."""

    concurrency: list[int]  # users of a closed loop
    requests_per_user: int
    min_requests: int  # of a load test
    repeats: int  # of every point, arms in turn
    threshold: float  # of the arm that verifies by a static threshold
    arms: list[str]  # of pareto


@dataclass
class ClaimConfig:
    """A statement about arms of a sweep; an arm is the options that pick it out, ``seed`` left aside.

    Compared is tau of ``first`` with tau of ``second``; with ``first_over`` and ``second_over``, the two ratios.
    """

    text: str
    first: dict[str, Any]
    second: dict[str, Any]
    first_over: dict[str, Any] | None = None
    second_over: dict[str, Any] | None = None
    kind: str = "greater"  # greater | equal_within
    margin: float = 0.0  # of equal_within: relative difference that still counts as equal


@dataclass
class SweepConfig:
    """What a multirun is about: how its report lays the jobs out, and what the paper says about them."""

    x: str | None  # option on the x axis; null = the report of experiment=table1
    lines: list[str]  # options whose values make the lines
    question: str | None
    claims: list[ClaimConfig]
    plan: bool  # print jobs with hours, disk and memory; run none


@dataclass
class PathsConfig:
    """Folders, relative to where the command is typed."""

    outputs: str
    reports: str
    cache: str


@dataclass
class ExperimentConfig:
    """The whole experiment."""

    task: str
    experiment: str | None
    seed: int
    target: TargetConfig
    drafter: DrafterConfig
    data: DataConfig
    features: FeaturesConfig
    trainer: TrainerConfig
    benchmark: BenchmarkConfig
    evaluation: EvaluationConfig
    policy: dict[str, Any]
    tracking: TrackingConfig
    checkpoint: str | None  # a .ckpt of this drafter; null = the finished job of the same options
    calibration: dict[str, Any]  # {num_prompts, from}
    scheduling: SchedulingConfig
    profile: ProfileConfig
    serving: ServingConfig
    load: LoadConfig
    export: ExportConfig
    inspect: InspectConfig
    sweep: SweepConfig
    paths: PathsConfig
    tiny_target: dict[str, Any] = field(default_factory=dict)


_NOT_NUMBERS = (
    "paths", "tracking", "experiment", "task", "tiny_target", "export", "inspect", "checkpoint", "scheduling",
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
    return config


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
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: expected at least 1.")
    choices = {
        "data.source": (config.data.source, ("language", "jsonl", "hub")),
        "data.replies": (config.data.replies, ("keep", "regenerate")),
        "evaluation.attention": (config.evaluation.attention, ("auto", "sdpa", "flex")),
        "features.mode": (config.features.mode, ("stored", "online", "bounded")),
        "benchmark.source": (config.benchmark.source, ("language", "prompts")),
    }
    for name, (chosen, allowed) in choices.items():
        if chosen not in allowed:
            raise ConfigError(f"{name}={chosen!r} is unknown; choose from {', '.join(allowed)}.")
    if config.data.source == "jsonl" and not config.data.path:
        raise ConfigError("data.source=jsonl needs data.path=<JSONL file with conversations or turns>.")
    if config.data.source == "hub" and not (config.data.hub or {}).get("id"):
        raise ConfigError("data.source=hub needs data.hub.id=<data set id>.")
    if config.features.mode == "stored" and (config.features.batch_size or 0) < 1:
        raise ConfigError(f"features.batch_size={config.features.batch_size}: expected at least 1.")
    if config.trainer.max_steps < 0:
        raise ConfigError(f"trainer.max_steps={config.trainer.max_steps}: expected at least 0.")
    if config.task == "train_eval" and config.trainer.max_steps == 0 and config.drafter.init_from is None:
        raise ConfigError(
            "trainer.max_steps=0 evaluates a drafter as it is: say which with drafter.init_from=<folder>."
        )
    if not 0 <= config.data.max_dropped <= 1:
        raise ConfigError(f"data.max_dropped={config.data.max_dropped}: expected a share from 0 to 1.")
