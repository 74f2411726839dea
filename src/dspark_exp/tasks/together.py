"""Recipe: jobs of a sweep that share target and data train from one target forward a batch (``sweep.shared_target``).

Each is a job as any other, with its own folder, optimizer, checkpoints, curves and evaluation, and gives the numbers
that it gives alone. They take turns batch by batch, so that the features of a batch are computed once for all. On
several devices every rank runs all of them; the order of turns is the same on each.
Run as a module, this is a rank: ``python -m dspark_exp.tasks.together JOBS.json``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from filelock import FileLock
from omegaconf import OmegaConf

from dspark_exp.config import validated
from dspark_exp.data.manifest import write_json
from dspark_exp.errors import ConfigError, LaunchError
from dspark_exp.hashing import short_digest
from dspark_exp.launch import num_ranks, run_on_ranks
from dspark_exp.tasks.auto_shard import with_shard_chosen
from dspark_exp.tasks.building import devices_of, open_target, ranks_of
from dspark_exp.tasks.prepare_data import compute_of
from dspark_exp.tasks.ranks import as_rank
from dspark_exp.tasks.train_eval import Company, Job, finished_results, train_eval
from dspark_exp.training import SharedFeatures, Stopped, TakeTurns, Turns

log = logging.getLogger(__name__)
_SHARED = ("seed", "target", "data", "features", "evaluation")
_SHARED_OF_TRAINER = ("batch_size", "accumulate", "accelerator", "devices", "num_nodes", "num_threads")
_MODULE = "dspark_exp.tasks.together"


def train_with_siblings(job: Job, jobs_path: Path) -> None:
    """Train this job together with the unfinished jobs of its sweep that share target and data.

    An arm that fails is named in the log; it is tried again when the sweep comes to it.

    Args:
        jobs_path: the resolved configs of the whole sweep, a JSON list.

    Raises:
        ConfigError: nothing could be shared: stored features, several nodes, or a search.
    """
    _check(job, jobs_path)
    if job.results_path.exists():
        return
    with FileLock(jobs_path.with_suffix(f".{company_key(job)}.lock")):
        alike = {sibling.folder: sibling for sibling in _jobs(jobs_path) if company_key(sibling) == company_key(job)}
        unfinished = [sibling for sibling in alike.values() if finished_results(sibling) is None]
        if len(unfinished) > 1 and ranks_of(job.config) == 1:
            train_together(unfinished)
        elif len(unfinished) > 1:
            _on_ranks(unfinished, jobs_path.with_name(f"together-{company_key(job)}"))


def train_together(jobs: Sequence[Job]) -> None:
    """Train and evaluate jobs that share target and data; those that fail are logged.

    Raises:
        Exception: one failed and there are several ranks, which must go on alike or not at all.
    """
    target = open_target(with_shard_chosen(jobs[0].config))
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
            wait(futures, return_when=ALL_COMPLETED if num_ranks() == 1 else FIRST_EXCEPTION)
        finally:
            turns.stop()
    for job, future in zip(jobs, futures, strict=True):
        error = future.exception()
        if error is not None and num_ranks() > 1 and not isinstance(error, Stopped):
            raise error
        if error is not None:
            log.warning("%s failed in company (%s) and is tried alone", job.folder.name, error)
    log.info("The target ran for %d of the %d batches that were trained on", features.num_computed, features.num_asked)


def _on_ranks(jobs: Sequence[Job], folder: Path) -> None:
    """The same on the devices of this machine. Company that has failed once is not tried again."""
    if folder.exists():
        return
    folder.mkdir()
    handed = folder / "jobs.json"
    write_json(handed, [job.plain for job in jobs])
    processes = devices_of(jobs[0].config)
    log.info("%d jobs train together on %d ranks; their logs: %s", len(jobs), processes, folder / "ranks")
    try:
        run_on_ranks(_MODULE, [str(handed.absolute())], processes, folder / "ranks")
    except LaunchError as error:
        log.warning("Training together ended (%s); jobs that have not finished are tried alone", error)


def _jobs(path: Path) -> list[Job]:
    return [Job(validated(OmegaConf.create(plain)), plain) for plain in json.loads(path.read_text())]


def _check(job: Job, jobs_path: Path) -> None:
    config = job.config
    if not jobs_path.exists():
        raise ConfigError("sweep.shared_target=true needs a sweep whose jobs are known before it starts, not a search.")
    if config.features.mode == "stored":
        raise ConfigError(
            "sweep.shared_target=true shares target passes during training, and features=stored makes none: all jobs "
            "read one store. Choose features=online or features=bounded, or leave it out."
        )
    if config.trainer.num_nodes > 1:
        raise ConfigError(
            "sweep.shared_target=true trains on the devices of one machine; set trainer.num_nodes=1 or leave it out."
        )


def company_key(job: Job) -> str:
    """What jobs must have in common: the target and every batch."""
    trainer = job.plain["trainer"]
    return short_digest([[job.plain[name] for name in _SHARED], [trainer[name] for name in _SHARED_OF_TRAINER]])


if __name__ == "__main__":
    as_rank(lambda path: train_together(_jobs(path)))
