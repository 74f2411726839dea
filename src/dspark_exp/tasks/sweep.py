"""A sweep's owner: opens the MLflow parent run, lets jobs leave records, builds one report after the last job.

A Hydra callback. A job that fails leaves a record with its reason; the report names it and the exit code is not 0.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from dspark_exp.reports import build_report, print_table
from dspark_exp.tracking import close_parent_run, open_parent_run

log = logging.getLogger(__name__)
RECORDS_VARIABLE = "DSPARK_EXP_SWEEP_RECORDS"
failures: list[str] = []  # what went wrong in this process's jobs and sweep; decides the exit code


class SweepReport(Callback):
    """Owns one multirun."""

    def __init__(self) -> None:
        self._parent: str | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        outputs = Path(config.paths.outputs)
        records = outputs / "sweeps" / uuid.uuid4().hex[:8]
        records.mkdir(parents=True)
        os.environ[RECORDS_VARIABLE] = str(records.absolute())
        if config.tracking.enabled:
            tags = {"experiment": str(config.experiment), "target": str(config.target.name), "kind": "sweep"}
            name = f"{config.experiment}/{config.target.name}"
            self._parent = open_parent_run(config.tracking.uri, config.tracking.experiment, name, tags)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        records = Path(os.environ.pop(RECORDS_VARIABLE))
        jobs = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
        finished = [json.loads(Path(job["results"]).read_text()) for job in jobs if job["status"] == "finished"]
        missing = [{"job": job["job"], "reason": job["reason"]} for job in jobs if job["status"] != "finished"]
        failures.extend(f"{job['job']}: {job['reason']}" for job in missing)
        folder = None
        if finished:
            folder = Path(config.paths.reports, str(config.experiment), str(config.target.name))
            report = build_report(folder, str(config.experiment), finished, missing)
            print_table(report)
            log.info("Report: %s", folder / "report.md")
        if self._parent is not None:
            metrics = {f"jobs/{name}": float(len(part)) for name, part in (("done", finished), ("missing", missing))}
            close_parent_run(config.tracking.uri, self._parent, metrics, folder, bool(missing))


def recorded(job: str, results: Path, work: Callable[[], object]) -> None:
    """Run a job of a sweep and leave a record of how it ended; errors do not take the sweep down."""
    folder = Path(os.environ[RECORDS_VARIABLE])
    path = folder / f"{len(list(folder.glob('*.json'))):03d}-{job}.json"
    record = {"job": job, "results": str(results.absolute()), "status": "killed", "reason": "did not end"}
    path.write_text(json.dumps(record))
    try:
        work()
        record |= {"status": "finished", "reason": ""}
    except Exception as error:
        record |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        log.error("%s failed: %s", job, error, exc_info=bool(os.environ.get("HYDRA_FULL_ERROR")))
    path.write_text(json.dumps(record))
