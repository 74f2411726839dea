"""The schema of an experiment: what every option is called, its type and its unit, and what null means.

Dataclasses alone; ``config.py`` fills and checks them. Below ``tasks`` no config is passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    shard: str | None  # null | fsdp | tensor_parallel | auto
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
    strategy: str  # ddp | fsdp
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
    packed_gb: float  # most gigabytes of a CPU's copies of weights in oneDNN's layout
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
    register: str | None  # name in the MLflow model registry; null = not registered


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
    """Load tests: experiments pareto, load_adaptive, latency, staleness, early_exit, calibration_shift."""

    concurrency: list[int]  # users of a closed loop; an open loop has as many rows as the most of them
    rates: list[float]  # of latency, as shares of what plain decoding serves
    arrivals: list[str]  # of latency: poisson, bursty
    requests_per_user: int
    min_requests: int  # of a load test
    repeats: int  # of every point
    slice_s: float | None  # arms take turns of so many seconds; null = one after the other, one engine in memory
    threshold: float  # of the arm that verifies by a static threshold
    arms: list[str]  # of pareto and latency


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
    shared_target: bool  # jobs with the same target and data train from one target forward a batch
    prune_after: int | None  # trials of a search that train to the end before hopeless ones are ended early


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
    name: str | None  # files the run under it, instead of experiment
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
