"""Recipe: write a trained drafter in the layout of a serving engine, and read it back before calling it done."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from dspark_exp.calibration import Calibration
from dspark_exp.errors import CheckpointError, ConfigError
from dspark_exp.interop import Exported, export_drafter, layout_for
from dspark_exp.reports.model_card import model_card
from dspark_exp.scheduling import read_table
from dspark_exp.tasks.building import build_drafter, capacity_path, open_target
from dspark_exp.tasks.checkpoints import load_drafter
from dspark_exp.tasks.track import open_history
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tracking import History

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GB = 1e9


def run_export(job: Job) -> Exported:
    """Export the finished job of these same options, or ``checkpoint``, or ``drafter.init_from`` as it is.

    Raises:
        ConfigError: an unknown dtype or shard size. CheckpointError: nothing to export, or the reader cannot read it.
    """
    config, wanted = job.config, job.config.export
    if wanted.dtype not in _DTYPES or wanted.shard_gb <= 0:
        raise ConfigError(
            f"export.dtype={wanted.dtype!r} must be one of {', '.join(_DTYPES)} and export.shard_gb={wanted.shard_gb} "
            "above 0."
        )
    registry = _registry(job)  # one that refuses does so before any work
    target = open_target(config)
    drafter = build_drafter(config, target).eval()
    results = _results(job)
    source, calibration = _load_weights(job, drafter, results)
    folder = Path(wanted.dir) if wanted.dir is not None else job.folder / f"export-{wanted.to}"
    layout = layout_for(wanted.to, drafter, target)  # a refusal comes before anything is written
    card = model_card(config.drafter.name, config.target.name, wanted.to, layout.serve, results, layout.notes)
    done = export_drafter(
        drafter,
        target,
        folder,
        reader=wanted.to,
        dtype=_DTYPES[wanted.dtype],
        shard_bytes=int(wanted.shard_gb * _GB),
        source=source,
        model_card=card,
        calibration=calibration,
        capacity=read_table(capacity_path(config)) if capacity_path(config).exists() else None,
    )
    log.info("Exported for %s: %s (read back, logits within %.1e)", wanted.to, folder, done.max_logit_error)
    if registry is not None:
        version = registry.register(job.folder.name, folder, str(wanted.register))
        log.info("Registered in MLflow: %s, version %s", wanted.register, version)
    log.info("Serve with: %s", layout.serve.replace("DIR", str(folder)).replace("TARGET", config.target.path))
    return done


def _registry(job: Job) -> History | None:
    """The store that holds the job's run, where the export is to be registered."""
    if job.config.export.register is None:
        return None
    history = open_history(job.config)
    if not history.has(job.folder.name):
        raise ConfigError(
            f"{job.config.tracking.uri} has no run of {job.folder.name} to register: run task=track first."
        )
    return history


def _results(job: Job) -> dict[str, Any] | None:
    """The metric sheet of the finished job, if it is what is exported."""
    if job.config.checkpoint is not None or not job.results_path.exists():
        return None
    return dict(json.loads(job.results_path.read_text()))


def _load_weights(job: Job, drafter: Any, results: dict[str, Any] | None) -> tuple[str, Calibration | None]:
    """Fill the drafter; returns where its weights came from, and the calibration that came with them."""
    config = job.config
    if config.checkpoint is not None:
        path = Path(config.checkpoint)
    elif results is not None and results["training"]["checkpoint"] is not None:
        path = job.folder / "checkpoints" / results["training"]["checkpoint"]
    elif config.drafter.init_from is not None:
        return str(config.drafter.init_from), None
    else:
        raise CheckpointError(
            "Nothing to export: no finished job has these options. Train first (the same command without task=export), "
            "or give checkpoint=<file.ckpt> or drafter.init_from=<folder or hub id>."
        )
    loaded = load_drafter(path, drafter)
    return f"{job.folder.name}, step {loaded.step}", loaded.calibration
