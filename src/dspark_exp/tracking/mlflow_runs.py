"""MLflow runs of jobs and sweeps, on a SQLite store by default.

In: settings, flat parameters, results. Out: runs to compare in the MLflow UI. Knows nothing about models.
The store is created under a file lock; a job's run id lives in its folder, so that a resumed job goes on in its run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock
from lightning.pytorch.loggers import Logger, MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only

PARENT_VARIABLE = "DSPARK_EXP_PARENT_RUN"
_PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True)
class TrackedData:
    """A data set as MLflow shows it beside a run. ``context``: training | evaluation."""

    name: str
    digest: str
    context: str
    profile: Mapping[str, Any]


class JobTracker:
    """The MLflow run of one job, as a context manager. Does nothing when tracking is off or on ranks above 0.

    Args:
        uri, experiment: tracking store and MLflow experiment; an empty uri turns tracking off.
        name: run name. folder: job folder, keeps the run id.
        parameters: flat resolved config. tags: searchable labels.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        name: str,
        folder: Path,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self.logger: Logger | bool = False
        self._folder = folder
        if not uri or getattr(rank_zero_only, "rank", False):
            return
        prepare_store(uri, experiment)
        id_file = folder / "mlflow_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        parent = os.environ.get(PARENT_VARIABLE)
        logger = MLFlowLogger(
            experiment_name=experiment,
            tracking_uri=uri,
            run_name=name,
            run_id=run_id,
            tags=dict(tags) | ({_PARENT_TAG: parent} if parent else {}),
        )
        if run_id is None and logger.run_id is not None:
            id_file.write_text(logger.run_id)
            logger.log_hyperparams(dict(parameters))
        self.logger = logger

    def __enter__(self) -> JobTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.logger, MLFlowLogger):
            self.logger.finalize("failed" if kind is not None else "success")

    def log_results(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        """Final metrics (``tau/<benchmark>`` and the like) and files as artifacts."""
        if not isinstance(self.logger, MLFlowLogger) or self.logger.run_id is None:
            return
        self.logger.log_metrics(dict(metrics))
        for path in files:
            self.logger.experiment.log_artifact(self.logger.run_id, str(path))

    def log_datasets(self, data: Sequence[TrackedData]) -> None:
        """Data sets that the run read, to filter and compare runs by."""
        if not isinstance(self.logger, MLFlowLogger) or self.logger.run_id is None:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    one.name, one.digest[:36], "local", json.dumps({"name": one.name}), None, json.dumps(one.profile)
                ),
                [InputTag("mlflow.data.context", one.context)],
            )
            for one in data
        ]
        self.logger.experiment.log_inputs(self.logger.run_id, inputs)


def prepare_store(uri: str, experiment: str) -> str:
    """Create the store and the experiment once; parallel jobs on a fresh store wait for each other."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)
    from mlflow import MlflowClient  # slow import: only when tracking is on

    if not uri.startswith("sqlite:///"):
        return _experiment_id(MlflowClient(uri), experiment, None)
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        return _experiment_id(MlflowClient(uri), experiment, database.parent.absolute() / "mlartifacts")


def open_parent_run(uri: str, experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """Start the run of a sweep and make its id known to every job started from here."""
    experiment_id = prepare_store(uri, experiment)
    from mlflow import MlflowClient

    run = MlflowClient(uri).create_run(experiment_id, run_name=name, tags=dict(tags))
    os.environ[PARENT_VARIABLE] = run.info.run_id
    return str(run.info.run_id)


def close_parent_run(uri: str, run_id: str, metrics: Mapping[str, float], folder: Path | None, failed: bool) -> None:
    """Attach the sweep's report and end its run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    for key, value in metrics.items():
        client.log_metric(run_id, key, value)
    if folder is not None:
        client.log_artifacts(run_id, str(folder), "report")
    client.set_terminated(run_id, "FAILED" if failed else "FINISHED")
    os.environ.pop(PARENT_VARIABLE, None)


def _experiment_id(client: Any, name: str, artifacts: Path | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=artifacts.as_uri() if artifacts else None))
