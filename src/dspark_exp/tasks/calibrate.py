"""Recipe: fit Sequential Temperature Scaling on prompts that evaluation does not use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dspark_exp.calibration import Calibration, Observations, fit_sts, read_shards
from dspark_exp.data.benchmarks import Prompt
from dspark_exp.errors import ConfigError, DataError
from dspark_exp.schema import ExperimentConfig
from dspark_exp.targets import Target
from dspark_exp.tasks.building import load_benchmarks
from dspark_exp.tasks.evaluate import record_rounds

log = logging.getLogger(__name__)
_OPTIONS = {"num_prompts": int, "from": (str, type(None))}


def calibration_options(config: ExperimentConfig) -> tuple[int, str | None]:
    """``calibration.num_prompts`` and ``calibration.from``.

    Raises:
        ConfigError: another option, or a value of another kind.
    """
    given = config.calibration
    for name, value in given.items():
        if name not in _OPTIONS or not isinstance(value, _OPTIONS[name]):  # type: ignore[arg-type]
            raise ConfigError(
                f"calibration.{name}={value!r}: the options are num_prompts (a number, 0 = no calibration) and from (a "
                "folder or pattern of recorded shards, or null)."
            )
    if given["num_prompts"] < 0:
        raise ConfigError(f"calibration.num_prompts={given['num_prompts']}: expected at least 0.")
    return given["num_prompts"], given["from"]


def held_out_prompts(config: ExperimentConfig, num_prompts: int) -> dict[str, list[Prompt]]:
    """Prompts that evaluation does not use, by benchmark.

    Raises:
        DataError: there are none.
    """
    prompts = load_benchmarks(config, held_out=num_prompts)
    if not prompts:
        raise DataError(
            "No benchmark has a prompt left for calibration beside those of evaluation: lower "
            "benchmark.num_prompts, give calibration.from=<recorded shards>, or calibration.num_prompts=0."
        )
    return prompts


def calibrate(config: ExperimentConfig, target: Target, drafter: Any) -> Calibration | None:
    """Temperatures of a trained drafter, or None where it predicts no confidence or calibration is off.

    Fitted on ``calibration.from`` (logits and prefix masks that an engine recorded from served traffic), else on rounds
    decoded here.

    Raises:
        DataError: unreadable shards, shards of another block size, or no prompt left beside those of evaluation.
    """
    num_prompts, shards = calibration_options(config)
    if drafter.confidence_head is None or (num_prompts == 0 and shards is None):
        return None
    if shards is not None:
        observations, source = read_shards(shards), f"served traffic ({Path(shards).name})"
        if observations.block_size != drafter.block_size:
            raise DataError(
                f"calibration.from={shards} was recorded with {observations.block_size} draft tokens, this drafter "
                f"drafts {drafter.block_size}."
            )
    else:
        rounds = record_rounds(config, target, drafter, held_out_prompts(config, num_prompts))
        observations = Observations.of_rounds([prompt for of_name in rounds.values() for prompt in of_name])
        source = ", ".join(rounds)
    calibration = fit_sts(observations, source)
    log.info(
        "Calibrated on %d rounds: temperatures %s",
        len(observations),
        " ".join(f"{t:.2f}" for t in calibration.temperatures),
    )
    return calibration
