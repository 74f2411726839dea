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
    folders = finished_jobs(Path(config.paths.outputs))
    if not folders:
        raise ConfigError(f"No finished job below {config.paths.outputs}; give paths.outputs=<folder of jobs>.")
    try:
        history = History(config.tracking.uri, config.tracking.experiment)
    except Exception as error:
        raise ConfigError(f"tracking.uri={config.tracking.uri} does not answer: {error}") from error
    logged = [history.log(_read(folder)) for folder in folders]
    log.info("%d jobs logged, %d were there already: %s", sum(logged), logged.count(False), config.tracking.uri)


def finished_jobs(outputs: Path) -> list[Path]:
    """Folders of training jobs with results; links of other experiments to them and copies elsewhere are left out."""
    found = (path.parent for path in sorted(outputs.glob("*/*/*/results.json")) if not path.parent.is_symlink())
    return [folder for folder in found if _is_job(folder)]


def _is_job(folder: Path) -> bool:
    if not (folder / "config.json").exists():
        return False
    results = json.loads((folder / "results.json").read_text())
    return "training" in results and results.get("job") == folder.name


def _read(folder: Path) -> FinishedJob:
    results = json.loads((folder / "results.json").read_text())
    parameters = flattened(json.loads((folder / "config.json").read_text()))
    return FinishedJob(
        folder, parameters, tags_of(results), final_metrics(results), files_of(folder), datasets_of(results)
    )
