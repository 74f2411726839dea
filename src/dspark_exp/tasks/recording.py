"""Rounds that experiments on confidence and load look at, recorded once per checkpoint and settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark_exp.calibration import Observations
from dspark_exp.data.benchmarks import Prompt
from dspark_exp.data.manifest import write_json
from dspark_exp.decoding import Full, Request, Round
from dspark_exp.schema import ExperimentConfig
from dspark_exp.serving import SimulatedRequest
from dspark_exp.targets import Target
from dspark_exp.tasks.building import build_batch, build_loop, build_sampling, load_benchmarks
from dspark_exp.tasks.calibrate import calibration_options, held_out_prompts
from dspark_exp.tasks.evaluate import record_rounds, requests_of
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import Trained

log = logging.getLogger(__name__)
SIMULATED_PER_BENCHMARK = 8  # answers whose every position is drafted from
_ROWS = 64


@dataclass(frozen=True)
class Splits:
    """Observations by domain: ``fit`` for calibration, ``test`` for judging it."""

    fit: dict[str, Observations]
    test: dict[str, Observations]


def recorded_splits(job: Job, target: Target, trained: Trained) -> Splits:
    """Whole blocks verified on held-out prompts and on the evaluation's.

    Raises:
        DataError: no held-out prompts, or a drafter without confidences.
    """
    config = job.config
    num_prompts = max(1, calibration_options(config)[0])
    prompts = {"fit": held_out_prompts(config, num_prompts), "test": load_benchmarks(config)}
    rounds = {name: _cached(job, target, trained, name, chosen) for name, chosen in prompts.items()}
    domain_of = {name: of_name[0].domain for name, of_name in prompts["test"].items()}
    seen = {split: {name: Observations.of_rounds(found[name]) for name in found} for split, found in rounds.items()}
    by_domain = {split: _by_domain(of_split, domain_of) for split, of_split in seen.items()}
    return Splits(**by_domain)


def _by_domain(by_benchmark: dict[str, Observations], domain_of: dict[str, str]) -> dict[str, Observations]:
    domains = list(dict.fromkeys(domain_of[name] for name in by_benchmark))
    return {d: Observations.join([o for name, o in by_benchmark.items() if domain_of[name] == d]) for d in domains}


def _cached(
    job: Job, target: Target, trained: Trained, split: str, prompts: dict[str, list[Prompt]]
) -> dict[str, list[list[dict[str, Any]]]]:
    path = job.folder / f"recorded-{split}.json"
    if path.exists():
        stored = json.loads(path.read_text())
        if stored["source"] == trained.source:
            return dict(stored["rounds"])
    log.info("Recording rounds of %d benchmarks (%s)", len(prompts), split)
    rounds = record_rounds(job.config, target, trained.drafter, prompts, record_overlap=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"source": trained.source, "rounds": rounds})
    return rounds


@torch.no_grad()
def recorded_outcomes(
    config: ExperimentConfig, target: Target, drafter: Any, prompts: dict[str, list[Prompt]]
) -> dict[str, list[SimulatedRequest]]:
    """For a few answers a benchmark: what a draft from every position of the target's own answer achieves.

    A draft that is cut short leads to a position that whole-block rounds never drafted from; here every position is
    known, so a simulated request may stop anywhere.
    """
    sampling = build_sampling(config.evaluation.sampling)
    plain = build_loop(target, None, sampling, config.evaluation.batch_size)
    found: dict[str, list[SimulatedRequest]] = {}
    for name, of_name in prompts.items():
        requests = requests_of(config, target, of_name[:SIMULATED_PER_BENCHMARK])
        answers = [g.token_ids for g in plain.run(requests)]
        places = [
            Request([*r.prompt_ids, *answer[:t]], drafter.block_size + 2, 7919 * i + t, ignore_stop=True)
            for i, (r, answer) in enumerate(zip(requests, answers, strict=True))
            for t in range(len(answer) - 1)
        ]
        rounds = iter(_first_rounds(target, drafter, sampling, places))
        along = [
            _along(len(r.prompt_ids), [next(rounds) for _ in answer[1:]])
            for r, answer in zip(requests, answers, strict=True)
        ]
        found[name] = [request for request in along if request is not None]
    return found


def _along(prompt_tokens: int, rounds: list[Round]) -> SimulatedRequest | None:
    if not rounds:
        return None
    return SimulatedRequest(
        prompt_tokens, np.array([r.confidence for r in rounds]), np.array([r.accepted for r in rounds])
    )


def _first_rounds(target: Target, drafter: Any, sampling: Any, requests: Sequence[Request]) -> list[Round]:
    """The first round of each request, whole block verified."""
    if not requests:
        return []
    longest = max(len(r.prompt_ids) for r in requests) + 2 * (drafter.block_size + 2)
    batch = build_batch(target, drafter, sampling, Full(), _ROWS, longest)
    rounds: dict[int, Round] = {}
    numbered = list(enumerate(requests))
    for first in range(0, len(numbered), _ROWS):  # in order: the places of one answer share its prefill
        batch.enter(numbered[first : first + _ROWS])
        batch.round()
        for progress in batch.leave(list(batch.active)):
            rounds[progress.index] = progress.generation.rounds[0]
    return [rounds[i] for i in range(len(requests))]
