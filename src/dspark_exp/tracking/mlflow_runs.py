"""MLflow runs of jobs and sweeps, on a SQLite store by default.

In: settings, flat parameters, results. Out: runs to compare in the MLflow UI. Knows nothing about models.
The store is created under a file lock; a job's run id lives in its folder, so that a resumed job goes on in its run.
Curves are also written beside the job, and a store that cannot be reached never ends a run: what it missed is logged
later from the job's folder (``task=track``).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only

from dspark_exp.errors import Pruned

log = logging.getLogger(__name__)
CURVES = "curves"  # folder of a job's metrics.csv files, one a process that trained
PARENT_VARIABLE = "DSPARK_EXP_PARENT_RUN"
JOB_TAG = "job"  # the folder name of a job, which holds the hash of its options
_ID_FILE = "mlflow_run_id"
PARENT_TAG = "mlflow.parentRunId"


@dataclass(frozen=True)
class TrackedData:
    """A data set as MLflow shows it beside a run. ``context``: training | evaluation."""

    name: str
    digest: str
    context: str
    profile: Mapping[str, Any]


class ForgivingLogger(MLFlowLogger):
    """Lightning's MLflow logger, but a store that stops answering does not end the training.

    The first failure is said once; what follows stays in the job's folder.
    """

    is_lost = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.attempt(lambda: super(ForgivingLogger, self).log_metrics(metrics, step))

    def log_hyperparams(self, params: Any) -> None:
        self.attempt(lambda: super(ForgivingLogger, self).log_hyperparams(params))

    def finalize(self, status: str = "success") -> None:
        self.attempt(lambda: super(ForgivingLogger, self).finalize(status))

    def attempt(self, work: Callable[[], object]) -> None:
        """Do it unless the store was lost before."""
        if self.is_lost:
            return
        try:
            work()
        except Exception as error:  # whatever a store, its network and its disk may raise
            self.is_lost = True
            _warn_lost(str(self._tracking_uri), error)


class JobTracker:
    """The MLflow run of one job, as a context manager. Does nothing in MLflow when tracking is off or on ranks above 0.

    ``loggers``: for Lightning, the CSV file of curves included.

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
        self.loggers: list[Logger] = [CSVLogger(folder, CURVES, flush_logs_every_n_steps=10)]
        self._mlflow: ForgivingLogger | None = None
        if not uri or getattr(rank_zero_only, "rank", False):
            return
        try:
            prepare_store(uri, experiment)
            run_id = known_run(uri, folder)
        except Exception as error:
            _warn_lost(uri, error)
            return
        parent = os.environ.get(PARENT_VARIABLE)
        self._mlflow = logger = ForgivingLogger(
            experiment_name=experiment,
            tracking_uri=uri,
            run_name=name,
            run_id=run_id,
            tags=dict(tags) | {JOB_TAG: folder.name} | ({PARENT_TAG: parent} if parent else {}),
        )
        self.loggers.append(logger)
        if run_id is None:
            logger.attempt(lambda: (folder / _ID_FILE).write_text(str(logger.run_id)))
            logger.log_hyperparams(dict(parameters))

    def __enter__(self) -> JobTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mlflow is not None:
            pruned = kind is not None and issubclass(kind, Pruned)
            self._mlflow.finalize("KILLED" if pruned else "failed" if kind is not None else "success")

    def log_results(self, metrics: Mapping[str, float], files: Sequence[Path], data: Sequence[TrackedData]) -> None:
        """Final metrics (``tau/<benchmark>`` and the like), files as artifacts, and the data sets that were read."""
        logger = self._mlflow
        if logger is not None:
            logger.attempt(lambda: log_outcome(logger.experiment, str(logger.run_id), metrics, files, data))


def log_outcome(
    client: Any, run_id: str, metrics: Mapping[str, float], files: Sequence[Path], data: Sequence[TrackedData]
) -> None:
    """What a finished job leaves in its run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

    now = int(time.time() * 1000)
    client.log_batch(run_id, metrics=[Metric(name, value, now, 0) for name, value in metrics.items()])
    for path in files:
        client.log_artifact(run_id, str(path))
    inputs = [
        DatasetInput(
            Dataset(one.name, one.digest[:36], "local", json.dumps({"name": one.name}), None, json.dumps(one.profile)),
            [InputTag("mlflow.data.context", one.context)],
        )
        for one in data
    ]
    client.log_inputs(run_id, inputs)


def known_run(uri: str, folder: Path) -> str | None:
    """The run of a job that this store holds already."""
    id_file = folder / _ID_FILE
    if not id_file.exists():
        return None
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    run_id = id_file.read_text().strip()
    try:
        MlflowClient(uri).get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None  # of another store
    return run_id


def _warn_lost(uri: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [""])[0][:160]
    log.warning(
        "MLflow at %s does not answer (%s: %s). The run goes on without it; task=track logs it later.",
        uri,
        type(error).__name__,
        reason,
    )


def prepare_store(uri: str, experiment: str) -> str:
    """Create the store and the experiment once; parallel jobs on a fresh store wait for each other."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is away holds a run up for seconds
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
