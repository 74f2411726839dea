"""Start a module on several ranks with torchrun: no argv is replayed, one rank that dies ends the job with its reason.

In: a module, its arguments, a number of processes. Out: nothing, or an error. Knows nothing about what it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark_exp.errors import LaunchError

FAILURE = "failure-rank-{rank}.txt"  # a rank that ends by an error writes its sentence here
_SHOWN_LINES = 12


def run_on_ranks(module: str, arguments: Sequence[str], processes: int, logs: Path) -> None:
    """Run ``python -m module arguments`` as ``processes`` ranks of this machine; rank 0 writes to the terminal.

    Args:
        logs: folder for what every rank printed, and for the sentences of ranks that fail.

    Raises:
        LaunchError: a rank failed or was killed; the others are ended within seconds.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob(FAILURE.format(rank="*")):
        old.unlink()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        f"--log-dir={logs}", "--redirects=3", "--tee=0:3", "-m", module, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode != 0:
        raise LaunchError(_reason(logs, processes))


def multi_node_commands(module: str, arguments: Sequence[str], processes: int, nodes: int) -> dict[str, str]:
    """What to type for several nodes: the torchrun line of every node, and the SLURM line that runs it everywhere."""
    run = (
        f"torchrun --nnodes={nodes} --nproc-per-node={processes} --rdzv-backend=c10d "
        f"--rdzv-endpoint=$HEAD_NODE:29500 -m {module} {' '.join(arguments)}"
    )
    srun = (
        "HEAD_NODE=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) "
        f"srun --nodes={nodes} --ntasks-per-node=1 {run}"
    )
    return {"on every node, HEAD_NODE being one of them": run, "inside a SLURM allocation": srun}


def _reason(logs: Path, processes: int) -> str:
    told = sorted(logs.glob(FAILURE.format(rank="*")))
    if told:
        return f"{told[0].read_text().strip()} (rank {told[0].stem.rsplit('-', 1)[-1]} of {processes})"
    errors = sorted(logs.rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
    lines = [line for path in errors[-1:] for line in path.read_text().splitlines() if line.strip()]
    tail = "\n  ".join(lines[-_SHOWN_LINES:])
    return (
        f"A rank of {processes} was killed or crashed; its job ended. Run the same command again to go on from the "
        f"last checkpoint. Logs of every rank: {logs}" + (f"\n  {tail}" if tail else "")
    )
