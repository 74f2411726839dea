"""Recipe: a search ends trials early that do worse than its others did at the same step (``sweep.prune_after``).

What is hopeless, Optuna's median pruner says: the best ``val/tau`` of a trial so far lies below the median of what the
finished trials had at that step. A trial that was ended keeps its checkpoint and leaves ``pruned.json`` in its folder:
the same search, typed again, does not repeat it; without pruning it goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from dspark_exp.data.manifest import write_json
from dspark_exp.errors import ConfigError, Pruned
from dspark_exp.schema import ExperimentConfig

RECORDS_VARIABLE = "DSPARK_EXP_SWEEP_RECORDS"
ABOUT = "sweep"  # in the folder of records: what the sweep is
_PRUNED = "pruned.json"
Curve = Sequence[Mapping[str, float]]


def pruning_of(config: ExperimentConfig, folder: Path) -> Pruning | None:
    """What ends this job early, if it is a trial of a search that prunes.

    Raises:
        ConfigError: pruning was asked for outside a search.
        Pruned: the trial was ended before.
    """
    if config.sweep.prune_after is None:
        return None
    records = Path(os.environ.get(RECORDS_VARIABLE, ""))
    about = records / ABOUT
    if RECORDS_VARIABLE not in os.environ or not json.loads(about.read_text())["search"]:
        raise ConfigError(
            f"sweep.prune_after={config.sweep.prune_after} ends trials of a search early (+sweeps=tune); elsewhere "
            "every job is trained to its end: leave it out."
        )
    check_not_pruned(folder)
    return Pruning(records, config.sweep.prune_after)


def check_not_pruned(folder: Path) -> None:
    """Raise Pruned where the job of this folder was ended early."""
    path = folder / _PRUNED
    if path.exists():
        known = json.loads(path.read_text())
        raise Pruned(known["curve"])


def is_hopeless(curve: Curve, finished: Sequence[Curve], prune_after: int) -> bool:
    """What Optuna's median pruner says of a trial, given the curves of those that were trained to the end.

    Args:
        curve: points with ``step`` and ``tau``, the newest last. prune_after: finished trials before any is pruned.
    """
    import optuna  # of the extra `tune`, as is the sweeper that draws trials

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=prune_after)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    for one in (*finished, curve):
        trial = study.ask()
        for point in one:
            trial.report(point["tau"], int(point["step"]))
        if one is not curve:
            study.tell(trial, max(point["tau"] for point in one))
    return bool(trial.should_prune())


class Pruning(L.Callback):
    """Stops a trial after a validation that says it is hopeless; ranks stop together.

    Args:
        records: folder where the jobs of the search leave theirs. prune_after: see ``is_hopeless``.
    """

    def __init__(self, records: Path, prune_after: int) -> None:
        self._records, self._prune_after = records, prune_after
        self.stopped = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        found = (json.loads(path.read_text()) for path in self._records.glob("*.json"))
        finished = [record["curve"] for record in found if record.get("curve") and record["status"] == "finished"]
        hopeless = is_hopeless(pl_module.learning_curve, finished, self._prune_after)
        self.stopped = bool(trainer.strategy.broadcast(hopeless))
        trainer.should_stop = trainer.should_stop or self.stopped

    def end(self, folder: Path, curve: Curve, is_first_rank: bool) -> None:
        """Leave a note in the job's folder and raise Pruned, if the trial was stopped."""
        if not self.stopped:
            return
        if is_first_rank:
            write_json(folder / _PRUNED, {"curve": list(curve)})
        raise Pruned(curve)
