"""Recipe: log finished jobs to an MLflow store that does not have them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from dspark_exp.config import flattened
from dspark_exp.errors import ConfigError
from dspark_exp.schema import ExperimentConfig
from dspark_exp.tasks.tracked import datasets_of, files_of, final_metrics, tags_of
from dspark_exp.tracking import FinishedJob, History

log = logging.getLogger(__name__)


def run_track(config: ExperimentConfig) -> None:
    """``task=track``: every finished training job below ``paths.outputs`` that ``tracking.uri`` lacks.

    Raises:
        ConfigError: no finished job, or no store at that address.
    """
    jobs = finished_jobs(Path(config.paths.outputs))
    if not jobs:
        raise ConfigError(f"No finished job below {config.paths.outputs}; give paths.outputs=<folder of jobs>.")
    history = open_history(config)
    logged = [history.log(job) for job in jobs]
    log.info("%d jobs logged, %d were there already: %s", sum(logged), logged.count(False), config.tracking.uri)


def open_history(config: ExperimentConfig) -> History:
    """The store at ``tracking.uri``.

    Raises:
        ConfigError: tracking is off, or nothing answers there.
    """
    if not config.tracking.uri:
        raise ConfigError("tracking=none names no store: leave it out, or give tracking.uri.")
    try:
        return History(config.tracking.uri, config.tracking.experiment)
    except Exception as error:
        raise ConfigError(f"tracking.uri={config.tracking.uri} does not answer: {error}") from error


def finished_jobs(outputs: Path) -> list[FinishedJob]:
    """Training jobs with results; links of other experiments to them and copies elsewhere are left out."""
    found = (path.parent for path in sorted(outputs.glob("*/*/*/results.json")) if not path.parent.is_symlink())
    return [job for folder in found if (job := _read(folder)) is not None]


def _read(folder: Path) -> FinishedJob | None:
    results, config = json.loads((folder / "results.json").read_text()), folder / "config.json"
    if "training" not in results or results.get("job") != folder.name or not config.exists():
        return None
    parameters = flattened(json.loads(config.read_text()))
    return FinishedJob(
        folder, parameters, tags_of(results), final_metrics(results), files_of(folder), datasets_of(results)
    )
