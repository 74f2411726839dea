"""The command line: Hydra composes, one task runs. ``python -m dspark_exp --help``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from dspark_exp.config import conf_folder, register_sweeps, resolved_dict, validated
from dspark_exp.errors import ConfigError, DsparkError
from dspark_exp.quiet import quiet_libraries

log = logging.getLogger("dspark_exp")
CONF = conf_folder()
register_sweeps()


def run(composed: DictConfig) -> float | None:
    """Validate the config and hand over to its task. Returns what a search maximises, where a sweep trains."""
    from dspark_exp.tasks import (  # heavy imports after --help and --cfg are served
        confidence,
        estimate,
        export,
        inspect_data,
        latency,
        load,
        make_tiny_target,
        prepare_data,
        profile_capacity,
        ranks,
        report,
        serve,
        sweep,
        track,
        train_eval,
    )
    from dspark_exp.tasks.auto_shard import with_shard_chosen

    quiet_libraries()
    config = validated(composed)
    job = train_eval.Job(config, resolved_dict(composed))
    tasks: dict[str, Callable[[], object]] = {
        "train_eval": lambda: train_eval.show(ranks.train_on_devices(job)),
        "prepare_data": lambda: prepare_data.run_prepare_data(config),
        "inspect_data": lambda: inspect_data.run_inspect_data(config),
        "estimate": lambda: estimate.run_estimate(with_shard_chosen(config)),
        "export": lambda: export.run_export(job),
        "profile_capacity": lambda: profile_capacity.run_profile_capacity(job),
        "reliability": lambda: confidence.run_reliability(job),
        "threshold": lambda: confidence.run_threshold(job),
        "calibration_shift": lambda: confidence.run_calibration_shift(job),
        "pareto": lambda: load.run_pareto(job),
        "load_adaptive": lambda: load.run_load_adaptive(job),
        "latency": lambda: latency.run_latency(job),
        "staleness": lambda: load.run_staleness(job),
        "early_exit": lambda: load.run_early_exit(job),
        "report": lambda: report.run_report(config),
        "track": lambda: track.run_track(config),
        "serve": lambda: serve.run_serve(job),
        "make_tiny_target": lambda: make_tiny_target.run_make_tiny_target(config),
    }
    if config.task not in tasks:
        raise ConfigError(f"task={config.task!r} is unknown; choose from {', '.join(tasks)}.")
    if config.task == "train_eval" and sweep.RECORDS_VARIABLE in os.environ:
        return sweep.run_in_sweep(job)
    tasks[config.task]()
    return None


def _guarded(composed: DictConfig) -> float | None:
    try:
        return run(composed)
    except DsparkError as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        print(f"dspark_exp: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Entry of ``python -m dspark_exp`` and of the ``dspark_exp`` script."""
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_guarded)()
    sweep = sys.modules.get("dspark_exp.tasks.sweep")
    if sweep is not None and sweep.failures:
        print("dspark_exp: not everything finished:\n  " + "\n  ".join(sweep.failures), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
