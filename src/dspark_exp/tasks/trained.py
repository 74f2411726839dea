"""A trained drafter for tasks that use one: the checkpoint that is given, a finished job of the same training, or a new
training run."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dspark_exp.calibration import Calibration
from dspark_exp.config import conf_folder, resolved_dict, validated
from dspark_exp.errors import ConfigError
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import build_drafter, for_decoding
from dspark_exp.tasks.checkpoints import load_drafter
from dspark_exp.tasks.ranks import train_on_devices
from dspark_exp.tasks.train_eval import Job

log = logging.getLogger(__name__)
_TRAINING = ("seed", "target", "drafter", "data", "features", "trainer")


@dataclass(frozen=True)
class Trained:
    """A drafter ready to decode, its calibration if the checkpoint holds one, and where both come from."""

    drafter: Any
    calibration: Calibration | None
    source: str
    path: Path | None = None  # of the training checkpoint


def trained_drafter(job: Job, target: Target) -> Trained:
    """Load ``checkpoint`` or the newest finished job of the same training; train where there is none.

    Raises:
        CheckpointError: a checkpoint that does not fit.
    """
    config = job.config
    drafter = build_drafter(config, target)
    if config.checkpoint is None and config.trainer.max_steps == 0:
        return Trained(for_decoding(config, target, drafter), None, str(config.drafter.init_from))
    path = known_checkpoint(job)
    if path is None:
        log.info("No finished job has trained %s with these options: training it now", config.drafter.name)
        results = train_on_devices(job)
        path = job.folder / "checkpoints" / results["training"]["checkpoint"]
    loaded = load_drafter(path, drafter)
    log.info("Drafter: %s, step %d", path, loaded.step)
    if loaded.calibration is None and drafter.confidence_head is not None:
        log.warning(
            "%s holds no calibration: schedulers see raw confidences (+experiment=reliability fits one into it)",
            path,
        )
    source = f"{path.parent.parent.name}, step {loaded.step}"
    return Trained(for_decoding(config, target, drafter), loaded.calibration, source, path)


def with_drafter(job: Job, name: str) -> Job:
    """The same experiment with another drafter file, as ``drafter=NAME`` gives it.

    Raises:
        ConfigError: no such file.
    """
    path = conf_folder() / "drafter" / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(f"No drafter file {path.name} in {path.parent}.")
    merged = OmegaConf.create({**job.plain, "drafter": OmegaConf.load(path), "checkpoint": None})
    plain = resolved_dict(merged)
    return Job(validated(OmegaConf.create(plain)), plain)


def drafter_for_timing(job: Job, target: Target) -> Any:
    """The trained drafter if there is one, else one with random weights: speed of a round hardly depends on them."""
    config = job.config
    drafter = build_drafter(config, target)
    path = known_checkpoint(job)
    if path is not None:
        load_drafter(path, drafter)
    return for_decoding(config, target, drafter)


def known_checkpoint(job: Job) -> Path | None:
    """``checkpoint``, or that of the newest finished job of the same training."""
    given = job.config.checkpoint
    return Path(given) if given is not None else finished_checkpoint(job.config, job.plain)


def finished_checkpoint(config: ExperimentConfig, plain: dict[str, Any]) -> Path | None:
    """The checkpoint of the newest finished job, of any experiment, that was trained with the same options."""
    wanted = training_options(plain)
    for path in sorted(
        Path(config.paths.outputs).glob(f"*/{config.target.name}/{config.drafter.name}-*/results.json"),
        key=lambda found: found.stat().st_mtime,
        reverse=True,
    ):
        results = json.loads(path.read_text())
        stored = json.loads((path.parent / "config.json").read_text())
        checkpoint = path.parent / "checkpoints" / str(results.get("training", {}).get("checkpoint"))
        if training_options(stored) == wanted and checkpoint.exists():
            return checkpoint
    return None


def training_options(plain: dict[str, Any]) -> dict[str, Any]:
    """What decides a drafter's weights. Threads and the rule for skipping drafts do not."""
    options = {name: dict(plain[name]) if isinstance(plain[name], dict) else plain[name] for name in _TRAINING}
    options["drafter"].pop("early_exit", None)
    options["trainer"].pop("num_threads", None)
    return options
