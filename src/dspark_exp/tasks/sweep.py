"""A sweep's owner: opens the MLflow parent run, lets jobs leave records, builds one report after the last job.

A Hydra callback. Jobs may run in this process or in a launcher's (joblib, submitit, ray): they find the records' folder
in the environment. A job that fails leaves a record with its reason; the report names it and the exit code is not 0.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import time
import uuid
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from dspark_exp.config import filed_under, flattened, resolved_dict
from dspark_exp.data.manifest import write_json
from dspark_exp.errors import Pruned
from dspark_exp.reports import (
    build_report,
    build_search_report,
    build_sweep_report,
    print_search,
    print_sweep,
    print_table,
    trial,
)
from dspark_exp.tasks.plan import planned, print_plan
from dspark_exp.tasks.pruning import ABOUT, RECORDS_VARIABLE
from dspark_exp.tasks.ranks import train_on_devices
from dspark_exp.tasks.together import train_with_siblings
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tracking import close_parent_run, open_parent_run

log = logging.getLogger(__name__)
_JOBS = "jobs"  # in the folder of records: the configs of all jobs, where they train together
failures: list[str] = []  # what went wrong in the jobs of this process's sweep; decides the exit code


class SweepReport(Callback):
    """Owns one multirun."""

    def __init__(self) -> None:
        self._parent: str | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        records = Path(config.paths.outputs) / "sweeps" / uuid.uuid4().hex[:8]
        records.mkdir(parents=True)
        os.environ[RECORDS_VARIABLE] = str(records.absolute())
        axes = swept_options(config)
        about = {"num_jobs": math.prod(axes.values()), "swept": list(axes), "started": time.time()}
        about["search"] = _is_search(config)
        write_json(records / ABOUT, about)
        if config.sweep.shared_target and not about["search"]:
            write_json(records / _JOBS, _jobs_of(config))
        if config.tracking.enabled and not config.sweep.plan and config.task == "train_eval":
            tags = {"experiment": filed_under(config) or "", "target": str(config.target.name), "kind": "sweep"}
            name = f"{filed_under(config) or 'multirun'}/{config.target.name}"
            self._parent = open_parent_run(config.tracking.uri, config.tracking.experiment, name, tags)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        records = Path(os.environ.pop(RECORDS_VARIABLE))
        jobs = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
        ended_well = ("finished", "pruned")
        missing = [{"job": job["job"], "reason": job["reason"]} for job in jobs if job["status"] not in ended_well]
        failures.extend(f"{job['job']}: {job['reason']}" for job in missing)
        finished = [job for job in jobs if job["status"] == "finished"]
        if config.sweep.plan:
            print_plan(finished)
            return
        folder = None
        if finished:
            named = Path(config.paths.reports, filed_under(config) or "", str(config.target.name))
            folder = named if filed_under(config) else records / "report"  # one without a name is not kept
            _write_report(config, folder, jobs, missing)
            log.info("Report: %s", folder / "report.md")
        if self._parent is not None:
            metrics = {f"jobs/{name}": float(len(part)) for name, part in (("done", finished), ("missing", missing))}
            close_parent_run(config.tracking.uri, self._parent, metrics, folder, bool(missing))


def _write_report(config: DictConfig, folder: Path, jobs: list[dict[str, Any]], missing: list[dict[str, str]]) -> None:
    finished = [job for job in jobs if job["status"] == "finished"]
    results = [json.loads(Path(job["results"]).read_text()) for job in finished]
    if _is_search(config):
        found_at = {job["results"]: found for job, found in zip(finished, results, strict=True)}
        trials = [
            trial(number, job["options"], job["curve"], found_at.get(job.get("results")))
            for number, job in enumerate(jobs)
            if job.get("curve")
        ]
        named = filed_under(config) or "search"
        print_search(build_search_report(folder, named, str(config.sweep.question or ""), results, trials, missing))
        return
    if config.sweep.x is None:
        print_table(build_report(folder, filed_under(config) or "multirun", results, missing))
        return
    about: Any = OmegaConf.to_container(config.sweep, resolve=True)
    options = [flattened(json.loads(Path(job["results"]).with_name("config.json").read_text())) for job in finished]
    print_sweep(build_sweep_report(folder, filed_under(config) or "multirun", about, results, options, missing))


def _is_search(config: DictConfig) -> bool:
    """Whether the sweeper draws values as it goes; a grid is known before it starts."""
    return "n_trials" in config.hydra.sweeper


def swept_options(config: DictConfig) -> dict[str, int]:
    """Number of values of every swept option, of a sweep file or of the command line; their product is the jobs."""
    if _is_search(config):
        params = config.hydra.sweeper.params
        return {**dict.fromkeys(params, 1), next(iter(params)): int(config.hydra.sweeper.n_trials)}
    return {
        item.key_or_group: len(list(item.sweep_iterator())) for item in _overrides(config) if item.is_sweep_override()
    }


def _overrides(config: DictConfig) -> list[Override]:
    """Everything that was typed, and what a sweep file sweeps unless it was typed."""
    typed = list(config.hydra.overrides.task)
    params: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    params = params.get("params") or {}
    narrowed = {text.split("=", 1)[0].lstrip("+~") for text in typed}
    typed += [f"{key}={value}" for key, value in params.items() if key not in narrowed]
    return list(OverridesParser.create().parse_overrides(typed))


def _jobs_of(config: DictConfig) -> list[dict[str, Any]]:
    """The resolved config of every job of a sweep over a grid."""
    loader = GlobalHydra.instance().config_loader()
    jobs = []
    choices = [
        [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_sweep_override()
        else [str(item.input_line)]
        for item in _overrides(config)
    ]
    for overrides in itertools.product(*choices):
        composed = loader.load_sweep_config(config, list(overrides))
        with open_dict(composed):
            del composed["hydra"]
        jobs.append(resolved_dict(composed))
    return jobs


def run_in_sweep(job: Job) -> float:
    """Run a job of a sweep and leave a record of how it ended; errors do not take the sweep down.

    Returns:
        The best ``val/tau``, which a search maximises; NaN of a job that was not trained or failed.
    """
    best = math.nan
    folder = Path(os.environ[RECORDS_VARIABLE])
    swept = json.loads((folder / ABOUT).read_text())["swept"]
    label, flat = _label(job, swept), flattened(job.plain)
    path = folder / f"{int(HydraConfig.get().job.num):04d}.json"
    record: dict[str, Any] = {"job": label, "status": "killed", "reason": "did not end"}
    record["options"] = {key: flat.get(key, flat.get(f"{key}.name")) for key in swept}
    write_json(path, record)
    started = time.perf_counter()
    try:
        if job.config.sweep.plan:
            record["plan"] = planned(job)
        else:
            if job.config.sweep.shared_target:
                train_with_siblings(job, folder / _JOBS)
            results = train_on_devices(job)
            tau = sum(row["tau"] for row in results["rows"]) / len(results["rows"])
            record |= {"results": str(job.results_path.absolute()), "tau": tau}
            record["curve"] = curve = results["training"]["learning_curve"]
            best = max((point["tau"] for point in curve), default=math.nan)
        record |= {"status": "finished", "reason": ""}
    except Pruned as ended:
        record |= {"status": "pruned", "reason": str(ended), "curve": ended.curve}
        best = ended.tau
        log.info("%s %s", label, ended)
    except Exception as error:
        record |= {"status": "failed", "reason": _reason(error)}
        log.error("%s failed: %s", label, record["reason"], exc_info=bool(os.environ.get("HYDRA_FULL_ERROR")))
    write_json(path, record)
    if record["status"] == "finished" and not job.config.sweep.plan:
        _log_progress(folder, label, record["tau"], time.perf_counter() - started)
    return best


def _label(job: Job, swept: list[str]) -> str:
    """The options that tell this job from its siblings."""
    typed = HydraConfig.get().overrides.task
    return " ".join(text for text in typed if text.split("=", 1)[0].lstrip("+") in swept) or job.folder.name


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full; make room (paths.cache holds what can be computed again) and run the same command"
    return f"{type(error).__name__}: {error}"


def _log_progress(folder: Path, label: str, tau: float, seconds: float) -> None:
    about = json.loads((folder / ABOUT).read_text())
    total = about["num_jobs"]
    statuses = [json.loads(path.read_text())["status"] for path in folder.glob("*.json")]
    ended = sum(status in ("finished", "failed", "pruned") for status in statuses)
    left = (time.time() - about["started"]) / max(1, ended) * (total - ended) / 60
    log.info("job %d of %d, %s: tau %.2f, %.0f s; about %.0f min left", ended, total, label, tau, seconds, left)
