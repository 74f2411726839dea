"""Recipes about confidence: is it true (reliability), what does a threshold buy (threshold), and does calibration
survive a change of domain (calibration_shift)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_exp.calibration import METHODS, Observations, expected_calibration_error, fit_method, fit_sts
from dspark_exp.decoding import Threshold
from dspark_exp.metrics import SurvivalCalibration, interval
from dspark_exp.reports.confidence import write_reliability, write_shift, write_threshold
from dspark_exp.scheduling import AsyncScheduler
from dspark_exp.serving import simulate
from dspark_exp.tasks.building import build_loop, build_sampling, load_benchmarks, open_target
from dspark_exp.tasks.checkpoints import store_calibration
from dspark_exp.tasks.evaluate import metric_row, requests_of
from dspark_exp.tasks.profile_capacity import measured_capacity
from dspark_exp.tasks.provenance import experiment_header, report_folder
from dspark_exp.tasks.recording import recorded_outcomes, recorded_splits
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import trained_drafter

log = logging.getLogger(__name__)
Calibrate = Callable[[np.ndarray], np.ndarray]
THRESHOLDS = tuple(round(0.1 * k, 1) for k in range(10))
_RESAMPLES = 200


def run_reliability(job: Job) -> Path:
    """Reliability of survivals by position, raw and calibrated, and every calibration method on the test split."""
    target = open_target(job.config)
    trained = trained_drafter(job, target)
    splits = recorded_splits(job, target, trained)
    fit, test = Observations.join(list(splits.fit.values())), Observations.join(list(splits.test.values()))
    calibration = fit_sts(fit, ", ".join(splits.fit))
    if trained.path is not None and trained.calibration is None:
        store_calibration(trained.path, calibration)
        log.info("The checkpoint held no calibration: these temperatures are in it now (%s)", trained.path)
    methods = {name: _judged(test, fit_method(name, fit)) for name in METHODS}
    groups = {"all": test, **splits.test}
    results = experiment_header(job.config, target, trained.source) | {
        "calibration": calibration.as_dict(),
        "methods": methods,
        "sts_against_raw": _change(test, calibration.apply),
        "domains": {name: _sheets(seen, calibration.apply) for name, seen in groups.items()},
        "rounds": {"fit": len(fit), "test": len(test)},
    }
    return write_reliability(report_folder(job.config), results)


def run_threshold(job: Job) -> Path:
    """Tokens a round, accepted and rejected, by threshold and domain: decoded, and replayed from whole blocks."""
    config = job.config
    target = open_target(config)
    trained = trained_drafter(job, target)
    splits = recorded_splits(job, target, trained)
    benchmarks = load_benchmarks(config)
    domains: dict[str, list[dict[str, Any]]] = {}
    for threshold in THRESHOLDS:
        loop = build_loop(
            target, trained.drafter, build_sampling(config.evaluation.sampling), config.evaluation.batch_size,
            Threshold(threshold),
        )  # fmt: skip
        by_domain: dict[str, list[Any]] = {}
        for prompts in benchmarks.values():
            by_domain.setdefault(prompts[0].domain, []).extend(loop.run(requests_of(config, target, prompts)))
        for domain, generations in by_domain.items():
            row = metric_row(generations, trained.drafter.block_size, loop.clock)
            domains.setdefault(domain, []).append(
                {
                    "threshold": threshold,
                    "tokens_per_round": row["tau"],
                    "low": row["tau_low"],
                    "high": row["tau_high"],
                    "accepted": row["acceptance_rate"] * row["verified_per_round"],
                    "verified": row["verified_per_round"],
                    "acceptance_rate": row["acceptance_rate"],
                    "rounds": row["rounds"],
                    "replayed": _replayed(splits.test[domain], threshold),
                }
            )
        log.info("threshold %.1f decoded", threshold)
    return write_threshold(
        report_folder(job.config), experiment_header(job.config, target, trained.source) | {"domains": domains}
    )


def run_calibration_shift(job: Job) -> Path:
    """Fit on one domain, test on the others: ECE of survivals and the throughput that the scheduler loses."""
    config = job.config
    target = open_target(config)
    trained = trained_drafter(job, target)
    splits = recorded_splits(job, target, trained)
    curve = measured_capacity(job, target).curve()
    benchmarks = load_benchmarks(config)
    outcomes: dict[str, list[Any]] = {}
    for name, answers in recorded_outcomes(config, target, trained.drafter, benchmarks).items():
        outcomes.setdefault(benchmarks[name][0].domain, []).extend(answers)
    fits: dict[str, Calibrate | None] = {"raw": None}
    fits |= {domain: fit_sts(seen).apply for domain, seen in splits.fit.items()}
    fits["all"] = fit_sts(Observations.join(list(splits.fit.values()))).apply
    matrix: dict[str, dict[str, Any]] = {}
    for name, calibrate in fits.items():
        matrix[name] = {}
        for domain, seen in splits.test.items():
            judged = _judged(seen, calibrate or (lambda confidence: confidence))
            users = {
                str(concurrency): simulate(
                    outcomes[domain] * max(1, 4 * concurrency // len(outcomes[domain])),
                    curve,
                    AsyncScheduler(curve),
                    num_rows=concurrency,
                    concurrency=concurrency,
                    calibrate=calibrate,
                ).throughput
                for concurrency in config.load.concurrency
            }
            matrix[name][domain] = {**judged, "throughput": users}
    return write_shift(
        report_folder(job.config), experiment_header(job.config, target, trained.source) | {"matrix": matrix}
    )


def _sheets(seen: Observations, calibrate: Calibrate) -> dict[str, Any]:
    """Confidences raw and calibrated and, of sampled rounds, the analytic rates that the head learns (Eq. 8)."""
    sheets = {"raw": _sheet(seen, seen.confidence), "calibrated": _sheet(seen, calibrate(seen.confidence))}
    return sheets if seen.overlap is None else sheets | {"analytic": _sheet(seen, seen.overlap)}


def _sheet(seen: Observations, confidence: np.ndarray) -> dict[str, Any]:
    """ECE, AUROC, Brier, counts and bins by position (torchmetrics)."""
    metric = SurvivalCalibration(seen.block_size)
    metric.update(torch.tensor(confidence), torch.tensor(seen.accepted), torch.tensor(seen.verified))
    return metric.compute()


def _judged(seen: Observations, calibrate: Calibrate) -> dict[str, Any]:
    """Mean ECE and Brier of survivals over positions, with intervals over prompts."""
    survival = calibrate(seen.confidence).cumprod(1)
    low, high = interval(np.array([_mean_ece(seen, survival, chosen) for chosen in _resampled(seen)]))
    everything = np.arange(len(seen))
    brier = [
        float(((survival[seen.seen(k), k] - seen.survived(k)[seen.seen(k)]) ** 2).mean())
        for k in range(seen.block_size)
        if seen.seen(k).any()
    ]
    return {
        "mean_ece": _mean_ece(seen, survival, everything),
        "low": low,
        "high": high,
        "mean_brier": float(np.mean(brier)),
        "ece": [_ece_at(seen, survival, everything, k) for k in range(seen.block_size)],
    }


def _change(seen: Observations, calibrate: Calibrate) -> dict[str, float]:
    """Mean ECE calibrated minus raw, and its interval over prompts drawn for both alike."""
    raw, fitted = seen.confidence.cumprod(1), calibrate(seen.confidence).cumprod(1)
    changes = [_mean_ece(seen, fitted, chosen) - _mean_ece(seen, raw, chosen) for chosen in _resampled(seen)]
    low, high = interval(np.array(changes))
    everything = np.arange(len(seen))
    return {"change": _mean_ece(seen, fitted, everything) - _mean_ece(seen, raw, everything), "low": low, "high": high}


def _resampled(seen: Observations) -> list[np.ndarray]:
    """Rounds of prompts drawn with replacement, the same draws for everything that is compared."""
    prompts = np.unique(seen.group)
    members = [np.flatnonzero(seen.group == p) for p in prompts]
    generator = np.random.default_rng(0)
    return [
        np.concatenate([members[i] for i in generator.integers(0, len(prompts), len(prompts))])
        for _ in range(_RESAMPLES)
    ]


def _mean_ece(seen: Observations, survival: np.ndarray, rounds: np.ndarray) -> float:
    return float(np.nanmean([_ece_at(seen, survival, rounds, k) for k in range(seen.block_size)]))


def _ece_at(seen: Observations, survival: np.ndarray, rounds: np.ndarray, k: int) -> float:
    chosen = rounds[seen.verified[rounds] > k]
    return expected_calibration_error(survival[chosen, k], seen.accepted[chosen] > k)


def _replayed(seen: Observations, threshold: float) -> dict[str, float]:
    """The same rounds with their blocks cut by the threshold: drafts and outcomes as they were, anchors too."""
    lengths: Sequence[int] = (seen.confidence >= threshold).cumprod(1).sum(1)
    verified = np.minimum(lengths, seen.verified)
    accepted = np.minimum(seen.accepted, verified)
    return {
        "tokens_per_round": float(accepted.mean() + 1),
        "verified": float(verified.mean()),
        "acceptance_rate": float(accepted.sum() / max(1, verified.sum())),
    }
