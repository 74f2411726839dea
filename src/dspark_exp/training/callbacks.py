"""Callbacks of drafter training: how long steps wait for data, and what validation's rounds look like by position.

In: Lightning's hooks. Out: logged metrics. Knows nothing about drafters.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch

from dspark_exp.metrics import AcceptanceByPosition, SurvivalCalibration


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


class DraftDiagnostics(L.Callback):
    """By draft position, on the rounds of validation: conditional acceptance, and ECE, AUROC and Brier of survivals.

    Logged as ``val/acceptance_pos_k``, ``val/ece_pos_k``, ``val/auroc_pos_k`` and ``val/brier_pos_k``.

    Args:
        block_size: gamma.
        min_rounds: positions that fewer rounds verified are not logged.
    """

    def __init__(self, block_size: int, min_rounds: int = 30) -> None:
        self._acceptance, self._survival = AcceptanceByPosition(block_size), SurvivalCalibration(block_size)
        self._min_rounds, self._has_confidence = min_rounds, False

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self._has_confidence = pl_module.drafter.confidence_head is not None  # type: ignore[union-attr]
        for metric in (self._acceptance, self._survival):
            metric.to(pl_module.device)  # where ranks can sum it
        rounds = [r for r in outputs["rounds"] if r.drafted]
        if not rounds:
            return
        accepted, verified = (torch.tensor([getattr(r, name) for r in rounds]) for name in ("accepted", "verified"))
        self._acceptance.update(accepted, verified)
        if self._has_confidence:
            self._survival.update(torch.tensor([r.confidence for r in rounds]), accepted, verified)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        acceptance = self._acceptance.columns()
        columns, counts = {"acceptance": acceptance["conditional"]}, acceptance["counts"]
        if self._has_confidence:
            survival = self._survival.compute()
            columns |= {name: survival[name] for name in ("ece", "auroc", "brier")}
        pl_module.log_dict(
            {
                f"val/{name}_pos_{k + 1}": value
                for name, values in columns.items()
                for k, value in enumerate(values)
                if counts[k] >= self._min_rounds and value == value  # noqa: PLR0124 (not NaN)
            }
        )
        self._acceptance.reset()
        self._survival.reset()
