"""Runs written after the fact, from what a finished job left in its folder: for jobs that were not tracked, and for
another store. Also models of the registry.

In: parameters, curves, results and files of a job. Out: an MLflow run like the one that the job itself would have made.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_exp.tracking.mlflow_runs import (
    CURVES,
    JOB_TAG,
    PARENT_TAG,
    TrackedData,
    log_outcome,
    prepare_store,
)

_MOST_PARAMETERS, _MOST_METRICS = 100, 1000  # of one request to a store


@dataclass(frozen=True)
class FinishedJob:
    """What a finished job's folder says about it."""

    folder: Path
    parameters: Mapping[str, Any]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    files: Sequence[Path]
    data: Sequence[TrackedData]


class History:
    """Finished jobs as runs of one experiment of one store; what is there already is left alone."""

    def __init__(self, uri: str, experiment: str) -> None:
        self._experiment_id = prepare_store(uri, experiment)
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(uri)
        self._parents: dict[tuple[str, str], str] = {}

    def log(self, job: FinishedJob) -> bool:
        """Returns False where the store has the whole run. A run that broke off is replaced."""
        for run in self._runs_of(job.folder.name):
            if run.info.status == "FINISHED" and "tau/all" in run.data.metrics:
                return False
            self._client.delete_run(run.info.run_id)
        started = int((job.folder / "config.json").stat().st_mtime * 1000)
        ended = int((job.folder / "results.json").stat().st_mtime * 1000)
        tags = {**job.tags, JOB_TAG: job.folder.name, PARENT_TAG: self._parent_of(job, started)}
        run = self._client.create_run(self._experiment_id, start_time=started, tags=tags, run_name=job.folder.name)
        self._log_parameters(run.info.run_id, job.parameters)
        self._log_curves(run.info.run_id, job.folder / CURVES, ended)
        log_outcome(self._client, run.info.run_id, job.metrics, job.files, job.data)
        self._client.set_terminated(run.info.run_id, "FINISHED", end_time=ended)
        return True

    def register(self, job: str, folder: Path, model: str) -> str | None:
        """A folder as an artifact of a job's run and as a new version of a registered model.

        Returns:
            The version; None where the store has no run of this job.
        """
        from mlflow.exceptions import MlflowException

        runs = self._runs_of(job)
        if not runs:
            return None
        info = runs[0].info
        self._client.log_artifacts(info.run_id, str(folder), folder.name)
        try:
            self._client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self._client.create_model_version(model, f"{info.artifact_uri}/{folder.name}", info.run_id)
        return str(version.version)

    def has(self, job: str) -> bool:
        """Whether the store has a run of this job."""
        return bool(self._runs_of(job))

    def _runs_of(self, job: str) -> list[Any]:
        return self._found(f"tags.{JOB_TAG} = '{job}'")

    def _found(self, condition: str) -> list[Any]:
        return list(self._client.search_runs([self._experiment_id], condition))

    def _parent_of(self, job: FinishedJob, started: int) -> str:
        """The run that groups the jobs of one experiment on one target."""
        experiment, target = job.tags["experiment"], job.tags["target"]
        if (experiment, target) not in self._parents:
            condition = f"tags.kind = 'sweep' and tags.experiment = '{experiment}' and tags.target = '{target}'"
            found = self._found(condition) or [self._new_parent(experiment, target, started)]
            self._parents[experiment, target] = str(found[0].info.run_id)
        return self._parents[experiment, target]

    def _new_parent(self, experiment: str, target: str, started: int) -> Any:
        tags = {"kind": "sweep", "experiment": experiment, "target": target}
        name = f"{experiment}/{target}"
        run = self._client.create_run(self._experiment_id, start_time=started, tags=tags, run_name=name)
        self._client.set_terminated(run.info.run_id, "FINISHED")
        return run

    def _log_parameters(self, run_id: str, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = [Param(name, str(value)[:500]) for name, value in parameters.items()]
        for first in range(0, len(values), _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=values[first : first + _MOST_PARAMETERS])

    def _log_curves(self, run_id: str, folder: Path, ended: int) -> None:
        from mlflow.entities import Metric

        points = [Metric(name, value, ended, step) for (name, step), value in read_curves(folder).items()]
        for first in range(0, len(points), _MOST_METRICS):
            self._client.log_batch(run_id, metrics=points[first : first + _MOST_METRICS])


def read_curves(folder: Path) -> dict[tuple[str, int], float]:
    """(metric, step) -> value of all metrics.csv files below; of a step that was trained twice, the later value."""
    values: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("*/metrics.csv"), key=lambda found: found.stat().st_mtime):
        with path.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                step = int(row.pop("step"))
                values |= {(name, step): float(text) for name, text in row.items() if text and name != "epoch"}
    return values
