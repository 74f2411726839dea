"""Batches for drafter training: the batch of step s is a function of (seed, s) alone, so a resumed run sees the same.

In: a data set of rows. Out: padded batches, and prompts for validation. Knows nothing about drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dspark_exp.contracts import TargetFeatures
from dspark_exp.data.feature_store import StoredRow, pad_ids, pad_rows
from dspark_exp.errors import ConfigError


class StepSampler(Sampler[list[int]]):
    """Batches of row indices by step: epoch e is a permutation seeded with (seed, e), read in order.

    Every rank reads its own stride of each global batch.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, first_step: int, num_steps: int, rank: int, world_size: int
    ) -> None:
        self._num_rows, self._batch_size, self._seed = num_rows, batch_size, seed
        self._first_step, self._num_steps = first_step, num_steps
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        permutations: dict[int, Tensor] = {}
        size = self._batch_size * self._world_size
        for step in range(self._first_step, self._num_steps):
            batch = []
            for index in range(step * size + self._rank, (step + 1) * size, self._world_size):
                epoch, offset = divmod(index, self._num_rows)
                if epoch not in permutations:
                    generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                    permutations = {epoch: torch.randperm(self._num_rows, generator=generator)} | permutations
                    permutations = dict(list(permutations.items())[:2])
                batch.append(int(permutations[epoch][offset]))
            yield batch


class DrafterData(L.LightningDataModule):
    """Training rows by step and validation prompts.

    Args:
        rows: training data set; its items may carry stored features.
        validation_prompts: (prompt ids, domain) for the draft loop.
        batch_size: sequences a step on each rank.
        num_steps: optimizer steps x accumulation: batches of the whole run.
        num_workers: loader processes.

    Raises:
        ConfigError: a batch size below one.
    """

    def __init__(
        self,
        rows: Dataset[StoredRow],
        validation_prompts: Sequence[tuple[list[int], str]],
        batch_size: int,
        num_steps: int,
        seed: int,
        pad_id: int,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"trainer.batch_size={batch_size}: expected at least 1.")
        self._rows, self._prompts = rows, validation_prompts
        self._batch_size, self._num_steps, self._seed = batch_size, num_steps, seed
        self._pad_id, self._num_workers = pad_id, num_workers
        self.domains = sorted({domain for _, domain in validation_prompts})  # of all ranks
        self._first_step = 0

    def train_dataloader(self) -> DataLoader[StoredRow]:
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        sampler = StepSampler(
            len(self._rows),  # type: ignore[arg-type]
            self._batch_size,
            self._seed,
            self._first_step,
            self._num_steps,
            rank,
            world,
        )
        return DataLoader(
            self._rows,
            batch_sampler=sampler,
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self._num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch: all validation prompts of this rank."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        return DataLoader([list(self._prompts[rank::world])], batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        done = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed if self.trainer else 0
        return {"next_step": int(done), "num_ranks": self.trainer.world_size if self.trainer else 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, now = state_dict.get("num_ranks", 1), self.trainer.world_size if self.trainer else 1
        if before != now:
            raise ConfigError(
                f"This run was begun on {before} rank(s) and cannot go on with {now}: their batches differ. Set "
                f"trainer.devices and trainer.num_nodes as before, or begin anew with another paths.outputs."
            )
        self._first_step = int(state_dict["next_step"])

    def _collate(self, items: Sequence[StoredRow]) -> dict[str, Tensor]:
        return collate(items, self._pad_id)


def collate(items: Sequence[StoredRow], pad_id: int) -> dict[str, Tensor]:
    """Right-padded batch; ``taps`` and ``final`` are there when every row carries them."""
    ids, mask = pad_ids([item.input_ids.tolist() for item in items], pad_id)
    supervised = pad_rows([item.supervised for item in items], ids.shape[1])
    batch = {"input_ids": ids, "attention_mask": mask, "supervised": supervised}
    taps = [item.taps for item in items if item.taps is not None]
    final = [item.final for item in items if item.final is not None]
    if len(taps) == len(items) == len(final):
        batch |= {"taps": pad_rows(taps, ids.shape[1]), "final": pad_rows(final, ids.shape[1])}
    return batch


def as_features(batch: dict[str, Tensor]) -> TargetFeatures:
    """The batch as the contract between rooms."""
    return TargetFeatures(
        batch["input_ids"], batch["supervised"], batch["taps"], batch["final"], batch["attention_mask"].sum(1)
    )
