"""Callbacks of drafter training: how long steps wait for their data.

In: Lightning's hooks. Out: a logged metric and a share of the run's time. Knows nothing about drafters.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class DataWait(L.Callback):
    """Share of training time between the end of a step and the start of the next one; validation does not count."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._started = 0.0
        self.waiting_s = self.working_s = 0.0

    @property
    def share(self) -> float:
        """From 0, never waiting, to 1."""
        return self.waiting_s / max(self.waiting_s + self.working_s, 1e-9)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._started = time.perf_counter()
        if self._ended is not None:
            self.waiting_s += self._started - self._ended

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._ended = time.perf_counter()
        self.working_s += self._ended - self._started
        pl_module.log("train/data_wait_share", self.share)

    def on_validation_start(self, *_: Any) -> None:
        self._ended = None
