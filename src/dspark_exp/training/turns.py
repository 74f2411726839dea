"""Arms that train in turns from one target: one works at a time, the one furthest behind, each on a thread of its own.

In: arms that ask before every batch. Out: the order in which they go, and features computed once for all that ask for
the same batch. Knows nothing about drafters or targets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from dspark_exp.errors import DsparkError

log = logging.getLogger(__name__)


class Stopped(DsparkError):
    """The arms were told to end."""


class Turns:
    """Which of several threads may work. Before its first turn an arm counts as a batch behind all that have begun.

    Args:
        num_arms: they are numbered from 0; among arms that are equally far the lowest number goes first.
    """

    def __init__(self, num_arms: int) -> None:
        self._changed = threading.Condition()
        self._batch_of = dict.fromkeys(range(num_arms), -1)
        self._is_stopped = False

    def take(self, arm: int, batch: int) -> None:
        """Hand over, and come back when no other arm is further behind than ``batch``.

        Raises:
            Stopped: ``stop`` was called.
        """
        with self._changed:
            self._batch_of[arm] = batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._next() == arm)
            if self._is_stopped:
                raise Stopped("Training in turns was interrupted.")

    def leave(self, arm: int) -> None:
        """This arm has ended, well or not."""
        with self._changed:
            del self._batch_of[arm]
            self._changed.notify_all()

    def stop(self) -> None:
        """No arm gets another turn."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _next(self) -> int:
        return min(self._batch_of, key=lambda arm: (self._batch_of[arm], arm))


class TakeTurns(L.Callback):
    """Makes a Lightning run wait for its turn before every batch.

    Args:
        label: names the run in the log, where lines of several runs follow one another.
    """

    def __init__(self, turns: Turns, arm: int, label: str) -> None:
        self._turns, self._arm, self._label = turns, arm, label

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._turns.take(self._arm, trainer.fit_loop.epoch_loop.batch_progress.total.completed)

    def on_validation_start(self, *_: Any) -> None:
        log.info("%s validates", self._label)


class SharedFeatures:
    """Features of the batch that was asked for last are kept for the other arms.

    Args:
        compute: ``(input_ids [N, S], attention_mask [N, S]) -> taps [N, S, m*d], final [N, S, d]``.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._compute = compute
        self._asked: tuple[Tensor, Tensor] | None = None
        self._features: tuple[Tensor, Tensor] | None = None
        self.num_asked = self.num_computed = 0

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        self.num_asked += 1
        asked = input_ids, attention_mask
        if self._features is None or not all(map(torch.equal, asked, self._asked or ())):
            self._asked = self._features = None  # room for the next
            self._features = self._compute(*asked)
            self._asked = asked
            self.num_computed += 1
        return self._features
