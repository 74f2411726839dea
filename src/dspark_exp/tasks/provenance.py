"""What a number came from: recorded with every results.json."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import dspark_exp
from dspark_exp.launch import num_ranks
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import device_name

_PACKAGES = ("torch", "transformers", "lightning", "numpy")


def provenance(
    config: ExperimentConfig, target: Target, data: dict[str, Any], prompts_sha256: dict[str, str]
) -> dict[str, Any]:
    """Sampling, stop ids, hashes, dtype, device, budget, versions and code revision."""
    return {
        "target": target.fingerprint(),
        "stop_ids": list(target.facts.stop_ids),
        "thinking": config.target.thinking,
        "evaluation": {
            "sampling": asdict(config.evaluation.sampling),
            "policy": config.policy,
            "max_new_tokens": config.benchmark.max_new_tokens,
            "seed": config.evaluation.seed,
            "prompts_sha256": prompts_sha256,
        },
        "data": data,
        "trainer": asdict(config.trainer),
        "seed": config.seed,
        "device": device_name(target),
        "threads": torch.get_num_threads(),
        "ranks": num_ranks(),
        "versions": {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "code": {"version": dspark_exp.__version__, "revision": code_revision()},
    }


def experiment_header(config: ExperimentConfig, target: Target, checkpoint: str) -> dict[str, Any]:
    """What the results of an experiment on a trained drafter begin with."""
    return {
        "experiment": config.experiment,
        "task": config.task,
        "target": config.target.name,
        "drafter": config.drafter.name,
        "checkpoint": checkpoint,
        "provenance": provenance(config, target, {}, {}),
    }


def report_folder(config: ExperimentConfig) -> Path:
    """``reports/<experiment>/<target>/``."""
    return Path(config.paths.reports, str(config.experiment), config.target.name)


def code_revision() -> str | None:
    """Git commit of the code, with ``+changes`` when the tree differs from it; None outside a repository."""
    folder = Path(dspark_exp.__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", str(folder))
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
