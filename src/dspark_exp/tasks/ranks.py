"""Recipe: a job on the devices that its config names. One device: here. Several: handed over to torchrun.

The hand-over is a file with the fully resolved config; ranks never see Hydra or the command line.
Run as a module, this is a rank: ``python -m dspark_exp.tasks.ranks CONFIG.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from dspark_exp.config import validated
from dspark_exp.errors import ConfigError, DsparkError, Pruned
from dspark_exp.launch import multi_node_commands, run_on_ranks
from dspark_exp.launch.ranks import end_rank, join_ranks
from dspark_exp.launch.torchrun import FAILURE
from dspark_exp.quiet import quiet_libraries
from dspark_exp.tasks.building import devices_of, ranks_of
from dspark_exp.tasks.pruning import check_not_pruned, pruning_of
from dspark_exp.tasks.train_eval import Job, finished_results, prepare_folder, train_eval

log = logging.getLogger(__name__)
_MODULE = "dspark_exp.tasks.ranks"


def train_on_devices(job: Job) -> dict[str, Any]:
    """``train_eval`` on ``trainer.devices``.

    Raises:
        ConfigError: several nodes: the message holds the commands to type.
        LaunchError: a rank failed.
        Pruned: a search ended the job early.
    """
    config = job.config
    if ranks_of(config) == 1:
        return train_eval(job)
    processes = devices_of(config)
    known = finished_results(job)
    if known is not None:
        return known
    prunes = pruning_of(config, job.folder) is not None
    prepare_folder(job)
    handed = job.folder / "config.json"
    if config.trainer.num_nodes > 1:
        commands = multi_node_commands(_MODULE, [str(handed.absolute())], processes, config.trainer.num_nodes)
        lines = "\n".join(f"  {where}:\n    {command}" for where, command in commands.items())
        raise ConfigError(
            f"trainer.num_nodes={config.trainer.num_nodes}: this process can only start ranks of its own machine. The "
            f"job is ready in {handed.parent}; start it with\n{lines}\nand type this command again for its report."
        )
    log.info("%s on %d ranks; their logs: %s", config.drafter.name, processes, job.folder / "ranks")
    run_on_ranks(_MODULE, [str(handed.absolute())], processes, job.folder / "ranks")
    if prunes:
        check_not_pruned(job.folder)
    return dict(json.loads(job.results_path.read_text()))


def as_rank(work: Callable[[Path], object]) -> NoReturn:
    """This process as one rank: ``work`` on the file that was handed over, between meeting the others and parting.

    A DsparkError becomes one sentence that the owner of the job reads.
    """
    rank = int(os.environ["RANK"])  # torchrun's word: the ranks have not met yet
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S", force=True)
    quiet_libraries()
    path = Path(sys.argv[1])
    try:
        join_ranks()
        work(path)
        end_rank()
    except DsparkError as error:
        logs = path.parent / "ranks"
        logs.mkdir(exist_ok=True)
        (logs / FAILURE.format(rank=rank)).write_text(str(error))
        print(f"dspark_exp: rank {rank}: {error}", file=sys.stderr)
        sys.exit(2)


def _train(path: Path) -> None:
    plain = json.loads(path.read_text())
    job = Job(validated(OmegaConf.create(plain)), plain)
    with suppress(Pruned):  # its note in the folder tells the owner
        train_eval(job)


if __name__ == "__main__":
    as_rank(_train)
