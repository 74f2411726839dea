"""Recipe: decode every benchmark with a drafter and fill the metric sheet (DESIGN section 5)."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark_exp.calibration import Calibration
from dspark_exp.data.benchmarks import Prompt
from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import Clock, Generation, Request, Round, SpeculativeLoop
from dspark_exp.launch import gathered, num_ranks, share
from dspark_exp.metrics import AcceptanceByPosition, AcceptedLength, SurvivalCalibration, interval, resampled_ratios
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import build_early_exit, build_loop, build_policy, build_sampling, for_decoding


@dataclass(frozen=True)
class Evaluation:
    """Rows of the metric sheet, the rounds of every prompt, and plain decoding's speed."""

    rows: list[dict[str, Any]]
    rounds: dict[str, list[list[dict[str, Any]]]]
    plain_tokens_per_s: float


def evaluate(
    config: ExperimentConfig,
    target: Target,
    drafter: Any,
    benchmarks: dict[str, list[Prompt]],
    calibration: Calibration | None = None,
) -> Evaluation:
    """One row a benchmark. Plain decoding of the same target runs in the same process for the speed-up."""
    wanted = config.evaluation
    drafter = for_decoding(config, target, drafter)
    sampling = build_sampling(wanted.sampling)
    policy, early_exit = build_policy(config, target), build_early_exit(config)
    loop = build_loop(target, drafter, sampling, wanted.batch_size, policy, calibration, early_exit)
    plain = build_loop(target, None, sampling, wanted.batch_size)
    sample = [p for prompts in benchmarks.values() for p in prompts[: wanted.plain_prompts]]
    plain_speed = _tokens_per_s(plain, requests_of(config, target, sample)) if sample else float("nan")
    rows, rounds = [], {}
    for name, prompts in benchmarks.items():
        generations = on_all_ranks(loop, requests_of(config, target, prompts))
        rounds[name] = [[vars(r) for r in g.rounds] for g in generations]
        row = metric_row(generations, drafter.block_size, loop.clock, calibration)
        speed = row["tokens_per_s"] / plain_speed if sample else float("nan")
        labels = {"drafter": config.drafter.name, "benchmark": name, "domain": prompts[0].domain}
        rows.append({**labels, **row, "plain_tokens_per_s": plain_speed, "speedup": speed})
    return Evaluation(rows, rounds, plain_speed)


def record_rounds(
    config: ExperimentConfig,
    target: Target,
    drafter: Any,
    benchmarks: dict[str, list[Prompt]],
    record_overlap: bool = False,
) -> dict[str, list[list[dict[str, Any]]]]:
    """Rounds by benchmark and prompt with whole blocks verified: what calibration and diagnostics look at."""
    wanted, decoding = config.evaluation, for_decoding(config, target, drafter)
    loop = build_loop(
        target, decoding, build_sampling(wanted.sampling), wanted.batch_size, record_overlap=record_overlap
    )
    found = {}
    for name, prompts in benchmarks.items():
        found[name] = [[vars(r) for r in g.rounds] for g in on_all_ranks(loop, requests_of(config, target, prompts))]
    return found


def on_all_ranks(loop: SpeculativeLoop, requests: Sequence[Request]) -> list[Generation]:
    """Every rank decodes its share; all get all of it. A request's output does not depend on its batch, hence not on
    the number of ranks. The loop's clock then holds the sum over ranks: speeds are those of one device."""
    generations = gathered(loop.run(share(requests)))
    if num_ranks() > 1:
        clocks = [vars(clock) for clock in gathered([loop.clock])]
        loop.clock = Clock(**{name: sum(clock[name] for clock in clocks) for name in clocks[0]})
    return generations


def draft_rounds(
    config: ExperimentConfig, target: Target, drafter: Any, prompt_ids: Sequence[list[int]]
) -> list[list[Round]]:
    """Rounds of held-out prompts, by prompt: what ``val/tau`` is made of."""
    was_training = drafter.training
    decoding = for_decoding(config, target, drafter)
    loop = build_loop(target, decoding, build_sampling(config.evaluation.sampling), config.evaluation.batch_size)
    limit = config.data.validation_max_new_tokens
    with torch.autocast(target.device.type, enabled=False):
        generations = loop.run([Request(ids, limit, seed=index) for index, ids in enumerate(prompt_ids)])
    target.catch_up()
    drafter.train(was_training)
    return [g.rounds for g in generations]


def metric_row(
    generations: Sequence[Generation], block_size: int, clock: Clock, calibration: Calibration | None = None
) -> dict[str, Any]:
    """The sheet of one benchmark; every ratio is a ratio of sums over all its prompts."""
    rounds = [r for g in generations for r in g.rounds]
    emitted = torch.tensor([r.emitted for r in rounds])
    accepted = torch.tensor([r.accepted for r in rounds])
    verified = torch.tensor([r.verified for r in rounds])
    length, positions = AcceptedLength(), AcceptanceByPosition(block_size)
    length.update(emitted)
    positions.update(accepted, verified)
    by_position = positions.columns()
    by_prompt = np.array([[sum(r.emitted for r in g.rounds), len(g.rounds)] for g in generations])
    low, high = interval(resampled_ratios(by_prompt[:, 0], by_prompt[:, 1]))
    num_rounds, num_verified = max(1, len(rounds)), int(verified.sum())
    tau = float(length.compute())
    row: dict[str, Any] = {
        "tau": tau,
        "tau_low": low,
        "tau_high": high,
        "acceptance_rate": int(accepted.sum()) / max(1, num_verified),
        "verify_rate": tau / (num_verified / num_rounds + 1),
        "conditional_acceptance": _finite(by_position["conditional"]),
        "position_counts": [int(c) for c in by_position["counts"]],
        "survival": _finite(by_position["survival"]),
        "rounds": len(rounds),
        "emitted_tokens": int(emitted.sum()),
        "drafted_per_round": sum(r.drafted for r in rounds) / num_rounds,
        "verified_per_round": num_verified / num_rounds,
        "prompts": len(generations),
        "finished": sum(g.finish_reason == "stop" for g in generations),
        "emitted_by_prompt": by_prompt[:, 0].tolist(),
        "rounds_by_prompt": by_prompt[:, 1].tolist(),
        **_speed(generations, len(rounds), clock),
    }
    known = [r for r in rounds if r.confidence]
    if known:
        row["confidence"] = _confidence_sheet(known, block_size, None)
        if calibration is not None:
            row["confidence_calibrated"] = _confidence_sheet(known, block_size, calibration)
    return row


def _confidence_sheet(rounds: Sequence[Round], block_size: int, calibration: Calibration | None) -> dict[str, Any]:
    confidence = np.array([r.confidence for r in rounds])
    if calibration is not None:
        confidence = calibration.apply(confidence)
    survival = SurvivalCalibration(block_size)
    accepted, verified = (torch.tensor([getattr(r, name) for r in rounds]) for name in ("accepted", "verified"))
    survival.update(torch.tensor(confidence), accepted, verified)
    sheet = survival.compute()
    return {name: sheet[name] if name == "bins" else _finite(sheet[name]) for name in sheet}


def _speed(generations: Sequence[Generation], num_rounds: int, clock: Clock) -> dict[str, float]:
    per_round = max(1, num_rounds)
    known = clock.prefill_s + clock.draft_s + clock.head_s + clock.verify_s + clock.extend_s
    return {
        "tokens_per_s": sum(len(g.token_ids) for g in generations) / max(clock.total_s, 1e-9),
        "draft_s_per_round": clock.draft_s / per_round,
        "head_s_per_round": clock.head_s / per_round,
        "verify_s_per_round": clock.verify_s / per_round,
        "extend_s_per_round": clock.extend_s / per_round,
        "host_s_per_round": max(0.0, clock.total_s - known) / per_round,
        "prefill_s": clock.prefill_s,
    }


def requests_of(config: ExperimentConfig, target: Target, prompts: Sequence[Prompt]) -> list[Request]:
    """A request's seed depends on its benchmark and index alone, never on batch or drafter."""
    return [
        Request(
            render_prompt(target.tokenizer, prompt.messages, config.target.thinking),
            config.benchmark.max_new_tokens,
            seed=zlib.crc32(f"{config.evaluation.seed}/{prompt.benchmark}/{index}".encode()),
        )
        for index, prompt in enumerate(prompts)
    ]


def _tokens_per_s(loop: SpeculativeLoop, requests: list[Request]) -> float:
    started = time.perf_counter()
    generations = loop.run(requests)
    return sum(len(g.token_ids) for g in generations) / (time.perf_counter() - started)


def _finite(values: list[float]) -> list[float | None]:
    """JSON has no NaN: a position that was never seen is null."""
    return [None if math.isnan(value) else value for value in values]
