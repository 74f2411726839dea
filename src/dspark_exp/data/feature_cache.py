"""Target features under a byte budget: kept on disk while there is room, computed again where there is not.

In: batches of token ids. Out: their features. Rows are files named after their tokens; the least recently used ones
are deleted first. Knows nothing about models: whoever builds it says how features are computed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_exp.data.feature_store import pad_rows
from dspark_exp.errors import ConfigError

log = logging.getLogger(__name__)
ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class FeatureCache:
    """Calls like ``Target.features`` on right-padded batches.

    Args:
        folder: of this target and these settings alone; files that are there are used again.
        compute: ``(input_ids [N, S], attention_mask [N, S]) -> taps [N, S, m*d], final [N, S, d]``.
        max_bytes: size limit of the files.
        dtype: of the stored numbers.

    Raises:
        ConfigError: a size limit below one byte.
    """

    def __init__(self, folder: Path, compute: ComputeFeatures, max_bytes: int, dtype: torch.dtype) -> None:
        if max_bytes < 1:
            raise ConfigError("features.max_gb must be above 0 for features=bounded; features=online stores nothing.")
        self._folder, self._compute, self._max_bytes, self._dtype = folder, compute, max_bytes, dtype
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*.partial"):
            torn.unlink()
        found = sorted((path.stat().st_mtime_ns, path) for path in folder.glob("*.safetensors"))
        self._sizes = OrderedDict((path.stem, path.stat().st_size) for _, path in found)  # oldest first
        self._total = sum(self._sizes.values())
        self.num_hits = self.num_misses = 0

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Features of a batch; the rows that are not stored share one forward pass."""
        lengths = attention_mask.sum(1).tolist()
        keys = [_key(ids[:length]) for ids, length in zip(input_ids, lengths, strict=True)]
        rows = [self._load(key) for key in keys]
        missing = [index for index, row in enumerate(rows) if row is None]
        self.num_hits, self.num_misses = self.num_hits + len(rows) - len(missing), self.num_misses + len(missing)
        if missing:
            width = max(lengths[index] for index in missing)
            taps, final = self._compute(input_ids[missing, :width], attention_mask[missing, :width])
            for position, index in enumerate(missing):
                parts = (taps[position, : lengths[index]], final[position, : lengths[index]])
                rows[index] = tuple(part.to("cpu", self._dtype).contiguous() for part in parts)
                self._store(keys[index], rows[index])
        found = [row for row in rows if row is not None]
        width = input_ids.shape[1]
        taps, final = (pad_rows([row[part] for row in found], width).to(input_ids.device) for part in (0, 1))
        return taps, final

    def _load(self, key: str) -> tuple[Tensor, ...] | None:
        if key not in self._sizes:
            return None
        path = self._path(key)
        try:
            stored = load_file(path)
            path.touch()
        except (OSError, SafetensorError) as error:
            log.warning("Feature file %s is unreadable (%s); it is computed again", path, error)
            self._forget(key)
            return None
        self._sizes.move_to_end(key)
        return stored["taps"], stored["final"]

    def _store(self, key: str, row: tuple[Tensor, ...] | None) -> None:
        assert row is not None
        path = self._path(key)
        temporary = path.with_suffix(".partial")
        save_file({"taps": row[0], "final": row[1]}, temporary)
        size = temporary.stat().st_size
        while self._sizes and self._total + size > self._max_bytes:
            self._forget(next(iter(self._sizes)))
        if size > self._max_bytes:
            temporary.unlink()  # a single row beyond the budget is computed whenever it is needed
            return
        temporary.replace(path)
        self._sizes[key] = size
        self._total += size

    def _forget(self, key: str) -> None:
        self._total -= self._sizes.pop(key)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"


def _key(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().astype(np.int32).tobytes()).hexdigest()[:32]
