"""Recipe: measure the capacity curve of a target, seconds of a ragged pass by its tokens, and whole rounds by requests.

Writes a table for the schedulers, a figure, and a report. Nothing is smoothed.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark_exp.data.manifest import write_json
from dspark_exp.decoding import Request
from dspark_exp.errors import ConfigError
from dspark_exp.reports.capacity import write_capacity_report
from dspark_exp.scheduling import CapacityTable
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import (
    build_sampling,
    capacity_path,
    identity_of,
    open_target,
    read_capacity,
)
from dspark_exp.tasks.round_times import EveryRound, batch_for_timing, prompts_for_rounds, round_seconds
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import drafter_for_timing

log = logging.getLogger(__name__)
_WARM_UP = 2
_ENTERING = ((1, 16), (1, 64), (1, 256), (4, 256), (16, 256))  # requests and tokens of each prompt


def run_profile_capacity(job: Job) -> Path:
    """Measure, write ``capacity_path`` and ``reports/capacity/<target>/``; returns the table's path."""
    return _profiled(job, open_target(job.config))


def _profiled(job: Job, target: Target) -> Path:
    config = job.config
    table = profile(config, target, drafter_for_timing(job, target))
    path = capacity_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, table.as_dict())
    folder = Path(config.paths.reports, "capacity", config.target.name)
    write_capacity_report(folder, config.target.name, table.as_dict())
    log.info("Capacity table: %s. Report: %s", path, folder / "report.md")
    return path


def measured_capacity(job: Job, target: Target) -> CapacityTable:
    """The table of this target and drafter, measured now where there is none.

    Raises:
        ConfigError: the table is of another model or device.
    """
    if job.config.scheduling.table is None and not capacity_path(job.config).exists():
        log.info("No capacity table yet: measuring it")
        _profiled(job, target)
    return read_capacity(job.config, target)


@torch.no_grad()
def profile(config: ExperimentConfig, target: Target, drafter: Any) -> CapacityTable:
    """The table: every B up to 32, then in steps that grow; every context length; rounds of 1 .. max_requests requests.

    Raises:
        ConfigError: context lengths that do not increase from at least 1.
    """
    wanted = config.profile
    contexts = list(wanted.context_lengths)
    if not contexts or contexts[0] < 1 or sorted(set(contexts)) != contexts:
        raise ConfigError(f"profile.context_lengths={contexts}: expected increasing lengths of at least 1 token.")
    batches = batch_sizes(wanted.max_tokens)
    seconds, spread = [], []
    for context in contexts:
        rows = [_quantiles(_pass(target, batch, context, wanted.max_requests), wanted.repeats) for batch in batches]
        seconds.append([median for median, _ in rows])
        spread.append([half for _, half in rows])
        log.info(
            "context %d: %.1f ms at B=1, %.1f ms at B=%d", context, 1e3 * rows[0][0], 1e3 * rows[-1][0], batches[-1]
        )
    rounds = _rounds(config, target, drafter)
    measured = identity_of(target) | {
        "threads": torch.get_num_threads(),
        "attention": target.attention,
        "drafter": config.drafter.name,
        "block_size": drafter.block_size,
        "max_requests": wanted.max_requests,
        "repeats": wanted.repeats,
    }
    return CapacityTable(batches, contexts, seconds, spread, rounds, measured)


def batch_sizes(largest: int) -> list[int]:
    """1 .. 32, then steps of an eighth of the size; the largest is always there."""
    sizes = list(range(1, min(32, largest) + 1))
    while sizes[-1] < largest:
        sizes.append(min(largest, sizes[-1] + max(4, sizes[-1] // 8)))
    return sizes


def _pass(target: Target, batch: int, context: int, max_requests: int) -> Callable[[], None]:
    """One ragged verification pass of ``batch`` tokens over at most ``max_requests`` requests, logits included."""
    num_rows = min(batch, max_requests)
    counts = [batch // num_rows + (row < batch % num_rows) for row in range(num_rows)]
    cache = target.new_cache(num_rows, context + max(counts))
    tokens = torch.arange(batch, device=target.device) % target.facts.num_usable_tokens

    def work() -> None:
        plan = cache.causal_pass(list(range(num_rows)), [context] * num_rows, counts)
        _, final = target.forward_ragged(tokens, plan)
        target.logits(final).argmax(-1).cpu()

    return work


def _rounds(config: ExperimentConfig, target: Target, drafter: Any) -> dict[str, Any]:
    """Whole rounds of the engine for 1, 2, 4, .. requests and every verification length."""
    wanted, size = config.profile, int(drafter.block_size)
    requests = sorted({*(2**k for k in range(12) if 2**k < wanted.max_requests), wanted.max_requests})
    lengths = list(range(size + 1))
    sampling = build_sampling(config.evaluation.sampling)
    means = {
        r: round_seconds(
            target, drafter, sampling, prompts_for_rounds(config, target, r), [-1, *lengths], wanted.repeats
        )
        for r in requests
    }
    entering = [(number, tokens) for number, tokens in _ENTERING if number in means]
    return {
        "requests": requests,
        "lengths": lengths,
        "seconds": [means[r][1:] for r in requests],
        "plain": [means[r][0] for r in requests],
        "prompt_tokens": [number * tokens for number, tokens in entering],
        "enter": [_enter_s(config, target, drafter, number, tokens, means[number][-1]) for number, tokens in entering],
    }


def _enter_s(
    config: ExperimentConfig, target: Target, drafter: Any, num_requests: int, prompt_tokens: int, round_s: float
) -> float:
    """Seconds of the way in of some requests: prefill, and what their first round takes longer than ``round_s``."""
    policy, size = EveryRound(drafter.block_size), drafter.block_size
    sampling = build_sampling(config.evaluation.sampling)
    batch = batch_for_timing(target, drafter, sampling, num_requests, policy, prompt_tokens + 2 * size + 2)
    ids = torch.randint(0, target.facts.num_usable_tokens, (num_requests, prompt_tokens)).tolist()
    requests = [Request(prompt, size + 2, seed=index, ignore_stop=True) for index, prompt in enumerate(ids)]

    def work() -> None:
        batch.enter(list(enumerate(requests)))
        batch.round()
        batch.leave(list(batch.active))

    return max(1e-9, _quantiles(work, config.profile.repeats)[0] - round_s)


def _quantiles(work: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median seconds and half the interquartile range."""
    for _ in range(_WARM_UP):
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    if repeats < 2:
        return times[0], 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / 2
