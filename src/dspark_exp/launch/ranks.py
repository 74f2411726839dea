"""This process among the ranks of its job. One rank where nothing was launched. Knows nothing about models."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from filelock import FileLock
from torch import distributed

Item = TypeVar("Item")
# other ranks may have the longer share, or another job the lock; a rank that dies is torchrun's to see
_LONGEST_WAIT = timedelta(days=2)


_before_meeting: list[Callable[[], None]] = []


def rank() -> int:
    """Global rank of this process; 0 before ``join_ranks``, whatever a cluster leaves in the environment."""
    return distributed.get_rank() if _joined() else 0


def num_ranks() -> int:
    """Processes of this job, over all nodes; 1 before ``join_ranks``."""
    return distributed.get_world_size() if _joined() else 1


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def join_ranks() -> None:
    """Meet the other ranks: gloo for CPU tensors and objects, NCCL for those on a GPU; each rank on its own GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, timeout=_LONGEST_WAIT)


def _prepare_to_meet() -> None:
    for work in _before_meeting:
        work()


def leave_ranks() -> None:
    """Part in order; a rank that ends by an error does not come here."""
    _before_meeting.clear()
    if _joined():
        distributed.destroy_process_group()


def end_rank() -> NoReturn:
    """Part in order and end this process, all being well.

    Here and now: in the interpreter's teardown, threads of gloo that still hold tensors may abort a process whose work
    is done (pytorch/pytorch#179291).
    """
    leave_ranks()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def share(items: Sequence[Item]) -> list[Item]:
    """Every n-th item, from this rank on."""
    return list(items[rank() :: num_ranks()])


def gathered(own: Sequence[Item]) -> list[Item]:
    """The results of all ranks for items that ``share`` dealt out, in the order of the items, on every rank."""
    if num_ranks() == 1:
        return list(own)
    _prepare_to_meet()
    parts: list[Any] = [None] * num_ranks()
    distributed.all_gather_object(parts, list(own))
    total = sum(len(part) for part in parts)
    return [parts[index % len(parts)][index // len(parts)] for index in range(total)]


def before_meeting(work: Callable[[], None]) -> None:
    """What this rank does before it meets the others, each time, in ``barrier``, ``gathered`` and the like."""
    _before_meeting.append(work)


def barrier() -> None:
    """Wait for all ranks."""
    if num_ranks() > 1:
        _prepare_to_meet()
        distributed.barrier()


@contextmanager
def locked_together(path: Path) -> Iterator[None]:
    """All ranks of this job inside at once, no other job: rank 0 holds the lock for them.

    A rank that fails inside ends its job, so the others need not be told.
    """
    lock = FileLock(path)
    if rank() == 0:
        lock.acquire()
    barrier()
    try:
        yield
        barrier()
    finally:
        if rank() == 0:
            lock.release()
