"""Recipe: jobs of a sweep that share target and data train from one target forward a batch (``sweep.shared_target``).

Each is a job as any other, with its own folder, optimizer, checkpoints, curves and evaluation, and gives the numbers
that it gives alone. They take turns batch by batch, so that the features of a batch are computed once for all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from filelock import FileLock
from omegaconf import OmegaConf

from dspark_exp.config import validated
from dspark_exp.errors import ConfigError
from dspark_exp.hashing import short_digest
from dspark_exp.tasks.building import open_target, ranks_of
from dspark_exp.tasks.prepare_data import compute_of
from dspark_exp.tasks.train_eval import Company, Job, finished_results, train_eval
from dspark_exp.training import SharedFeatures, TakeTurns, Turns

log = logging.getLogger(__name__)
_SHARED = ("seed", "target", "data", "features", "evaluation")
_SHARED_OF_TRAINER = ("batch_size", "accumulate", "accelerator", "num_threads")


def train_with_siblings(job: Job, jobs_path: Path) -> None:
    """Train this job together with the unfinished jobs of its sweep that share target and data.

    An arm that fails is named in the log; it is tried again when the sweep comes to it.

    Args:
        jobs_path: the resolved configs of the whole sweep, a JSON list.

    Raises:
        ConfigError: nothing could be shared: stored features, several devices, or a search.
    """
    _check(job, jobs_path)
    with FileLock(jobs_path.with_suffix(f".{_key(job)}.lock")):
        siblings = [Job(validated(OmegaConf.create(plain)), plain) for plain in json.loads(jobs_path.read_text())]
        alike = {sibling.folder: sibling for sibling in siblings if _key(sibling) == _key(job)}
        unfinished = [sibling for sibling in alike.values() if finished_results(sibling) is None]
        if len(unfinished) > 1:
            train_together(unfinished)


def train_together(jobs: Sequence[Job]) -> None:
    """Train and evaluate jobs that share target and data; those that fail are logged."""
    target = open_target(jobs[0].config)
    features = SharedFeatures(compute_of(jobs[0].config, target))
    turns = Turns(len(jobs))

    def run(arm: int) -> dict[str, Any]:
        try:
            turns.take(arm, -1)
            return train_eval(jobs[arm], Company(target, features, TakeTurns(turns, arm, jobs[arm].folder.name)))
        finally:
            turns.leave(arm)

    log.info("%d jobs train together: %s", len(jobs), ", ".join(job.folder.name for job in jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, arm) for arm in range(len(jobs))]
        try:
            wait(futures)
        finally:
            turns.stop()
    for job, future in zip(jobs, futures, strict=True):
        if (error := future.exception()) is not None:
            log.warning("%s failed in company (%s) and is tried alone", job.folder.name, error)
    log.info("The target ran for %d of the %d batches that were trained on", features.num_computed, features.num_asked)


def _check(job: Job, jobs_path: Path) -> None:
    config = job.config
    if not jobs_path.exists():
        raise ConfigError("sweep.shared_target=true needs a sweep whose jobs are known before it starts, not a search.")
    if config.features.mode == "stored":
        raise ConfigError(
            "sweep.shared_target=true shares target passes during training, and features=stored makes none: all jobs "
            "read one store. Choose features=online or features=bounded, or leave it out."
        )
    if ranks_of(config) > 1:
        raise ConfigError("sweep.shared_target=true trains on one device; set trainer.devices=1 or leave it out.")


def _key(job: Job) -> str:
    """What jobs must have in common: the target and every batch."""
    trainer = job.plain["trainer"]
    return short_digest([[job.plain[name] for name in _SHARED], [trainer[name] for name in _SHARED_OF_TRAINER]])
