"""Target features on disk: content-addressed, checksummed, written atomically, bounded.

In: rows and a function that computes features. Out: a data set of rows with features, shared by all drafters of a
sweep. Knows nothing about models. A folder is complete when its index exists; an interrupted build goes on where it
stopped, because every finished shard is valid by itself. Ranks of a job compute different shards. All stores under one
root share a byte budget: the least recently used ones that nobody reads make room.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from dspark_exp.data.manifest import check_manifest, write_json
from dspark_exp.data.rendering import Row
from dspark_exp.errors import ConfigError
from dspark_exp.hashing import file_digest, short_digest
from dspark_exp.launch import barrier, gathered, rank, share

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
ROWS_PER_SHARD = 256
ComputeFeatures = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GB = 1e9


@dataclass(frozen=True)
class StoredRow:
    """One training row; ``taps`` and ``final`` are absent when features are computed online."""

    input_ids: Tensor  # [S]
    supervised: Tensor  # [S] bool
    taps: Tensor | None = None  # [S, m*d]
    final: Tensor | None = None  # [S, d]


class TokenRows(Dataset[StoredRow]):
    """Rows without features (``features=online``)."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> StoredRow:
        row = self._rows[index]
        return StoredRow(torch.tensor(row.input_ids), torch.tensor(row.supervised))


class FeatureStore(Dataset[StoredRow]):
    """Rows with features read from memory-mapped shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = json.loads((folder / "index.json").read_text())
        self._starts: list[list[int]] = index["starts"]
        self._length = int(index["num_rows"])
        self._open: dict[int, Any] = {}
        self._hold = hold(folder)  # while this object lives, the store is not evicted

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> StoredRow:
        shard, offset = divmod(index, ROWS_PER_SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._folder / _shard_name(shard), framework="pt")
        handle = self._open[shard]
        first, last = self._starts[shard][offset], self._starts[shard][offset + 1]
        parts = {name: handle.get_slice(name)[first:last] for name in ("input_ids", "supervised", "taps", "final")}
        return StoredRow(parts["input_ids"].long(), parts["supervised"].bool(), parts["taps"], parts["final"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_hold": None}  # file handles stay in their process


def build_feature_store(
    root: Path,
    rows: Sequence[Row],
    compute: ComputeFeatures,
    fingerprint: dict[str, Any],
    *,
    feature_size: int,
    dtype: str,
    max_gb: float,
    batch_size: int,
    device: torch.device,
    pad_id: int,
    folder: Path | None = None,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureStore:
    """Open the store of exactly these rows, target and settings, computing what is missing or corrupt.

    Args:
        feature_size: (m + 1) * d, numbers per token.
        max_gb: size limit of all stores under ``root`` in gigabytes, checked before any work.
        folder: a store at a place of the caller's choice; null = under ``root``, named after its manifest.

    Raises:
        ConfigError: unknown dtype, or the store alone would exceed ``max_gb``.
        DataError: ``folder`` holds the features of something else; the message names the fields that differ.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"features.dtype={dtype!r} is unknown; choose from {', '.join(DTYPES)}.")
    num_bytes = sum(len(row.input_ids) for row in rows) * feature_size * DTYPES[dtype].itemsize
    if num_bytes > max_gb * _GB:
        raise ConfigError(
            f"Stored features need {num_bytes / _GB:.1f} GB, features.max_gb allows {max_gb:g}: raise it, take fewer "
            "rows (data.max_rows), store features.dtype=bfloat16, keep what fits and compute the rest again "
            "(features=bounded), or store nothing (features=online)."
        )
    manifest = {**fingerprint, "feature_dtype": dtype, "rows": _rows_digest(rows)}
    if folder is None:
        folder = root / short_digest(manifest)
        if rank() == 0 and not (folder / "index.json").exists():
            make_room(root, folder, num_bytes, int(max_gb * _GB))
    if rank() == 0:
        _make_ready(folder, manifest, num_bytes)
    barrier()
    if not (folder / "index.json").exists():
        _write_shards(folder, rows, compute, DTYPES[dtype], batch_size, device, pad_id, on_shard)
    return FeatureStore(folder)


def _make_ready(folder: Path, manifest: dict[str, Any], num_bytes: int) -> None:
    """Check what is there; a store with corrupt shards is one that is not finished."""
    _check_free_disk(folder, num_bytes)
    check_manifest(folder / "manifest.json", manifest, "features.dir")
    if corrupt := _corrupt_shards(folder):
        log.warning("Corrupt feature shards, computed again: %s", ", ".join(str(path) for path in corrupt))
        for path in corrupt:
            path.unlink(missing_ok=True)
        (folder / "index.json").unlink()


def _write_shards(
    folder: Path,
    rows: Sequence[Row],
    compute: ComputeFeatures,
    dtype: torch.dtype,
    batch_size: int,
    device: torch.device,
    pad_id: int,
    on_shard: Callable[[int, int], None],
) -> None:
    starts, checksums = [], []
    num_shards = -(-len(rows) // ROWS_PER_SHARD)
    for shard in share(range(num_shards)):
        part = rows[shard * ROWS_PER_SHARD : (shard + 1) * ROWS_PER_SHARD]
        lengths = [len(row.input_ids) for row in part]
        starts.append([0, *torch.tensor(lengths).cumsum(0).tolist()])
        path = folder / _shard_name(shard)
        if not path.exists():
            tensors = _compute_shard(part, compute, dtype, batch_size, device, pad_id)
            temporary = path.with_suffix(".partial")
            save_file(tensors, temporary)
            temporary.replace(path)
        checksums.append(file_digest(path))
        on_shard(shard + 1, num_shards)
    index = {"num_rows": len(rows), "starts": gathered(starts), "sha256": gathered(checksums)}
    if rank() == 0:
        write_json(folder / "index.json", index)
        _remember(folder)
    barrier()


def _compute_shard(
    part: Sequence[Row],
    compute: ComputeFeatures,
    dtype: torch.dtype,
    batch_size: int,
    device: torch.device,
    pad_id: int,
) -> dict[str, Tensor]:
    """Rows of similar length share a forward pass; the shard keeps their given order."""
    order = sorted(range(len(part)), key=lambda i: len(part[i].input_ids))
    taps: dict[int, Tensor] = {}
    final: dict[int, Tensor] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        ids, mask = pad_ids([part[i].input_ids for i in chosen], pad_id)
        taps_NSE, final_NSd = compute(ids.to(device), mask.to(device))
        for position, i in enumerate(chosen):
            length = len(part[i].input_ids)
            taps[i] = taps_NSE[position, :length].to("cpu", dtype)
            final[i] = final_NSd[position, :length].to("cpu", dtype)
    return {
        "input_ids": torch.tensor([t for row in part for t in row.input_ids], dtype=torch.int32),
        "supervised": torch.tensor([t for row in part for t in row.supervised], dtype=torch.uint8),
        "taps": torch.cat([taps[i] for i in range(len(part))]),
        "final": torch.cat([final[i] for i in range(len(part))]),
    }


def pad_ids(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids [N, S] and their attention mask."""
    length = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), length), pad_id)
    mask = torch.zeros(len(sequences), length, dtype=torch.long)
    for index, sequence in enumerate(sequences):
        ids[index, : len(sequence)] = torch.tensor(list(sequence))
        mask[index, : len(sequence)] = 1
    return ids, mask


def pad_rows(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Tensors [S_i, ...] stacked to [N, length, ...], zeros behind each."""
    out = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    for index, tensor in enumerate(tensors):
        out[index, : len(tensor)] = tensor
    return out


def _check_free_disk(folder: Path, num_bytes: int) -> None:
    if (folder / "index.json").exists():
        return
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    written = sum(path.stat().st_size for path in folder.glob("shard-*")) if folder.exists() else 0
    free = shutil.disk_usage(place).free
    if num_bytes - written > free:
        raise ConfigError(
            f"Stored features need {(num_bytes - written) / _GB:.1f} GB more, {place} has {free / _GB:.1f} GB free: "
            "take another disk (paths.cache or features.dir), or features=bounded or online."
        )


def make_room(root: Path, wanted: Path, num_bytes: int, max_bytes: int) -> None:
    """Delete the least recently used stores under ``root`` that nobody reads, until ``num_bytes`` more fit."""
    others = [path for path in root.glob("*") if path.is_dir() and path != wanted]
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in others}
    for path in sorted(others, key=_last_used):
        if sum(sizes.values()) + num_bytes <= max_bytes:
            return
        if is_free(path):
            log.warning(
                "features.max_gb: %s (%.2f GB) makes room; it is computed again on use", path, sizes[path] / _GB
            )
            shutil.rmtree(path)
            del sizes[path]


def hold(folder: Path) -> Any:
    """An open file with a shared lock: the store is being read. Also marks when it was used last."""
    stream = (folder / "in_use").open("a")
    (folder / "in_use").touch()
    if fcntl is not None:
        fcntl.flock(stream, fcntl.LOCK_SH)
    return stream


def _last_used(folder: Path) -> float:
    marker = folder / "in_use"
    return marker.stat().st_mtime if marker.exists() else 0.0


def is_free(folder: Path) -> bool:
    """Whether no process reads the store. Where files cannot be locked nothing is evicted."""
    if fcntl is None:
        return False
    with (folder / "in_use").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _corrupt_shards(folder: Path) -> list[Path]:
    """Shards whose contents are not those that were written; contents are read where size or time changed."""
    if not (folder / "index.json").exists():
        return []
    index = json.loads((folder / "index.json").read_text())
    marker = folder / "verified.json"
    known = json.loads(marker.read_text()) if marker.exists() else {}
    corrupt = []
    for shard, expected in enumerate(index["sha256"]):
        path = folder / _shard_name(shard)
        if not path.exists() or (known.get(path.name) != _stamp(path) and file_digest(path) != expected):
            corrupt.append(path)
    if not corrupt:
        _remember(folder)
    return corrupt


def _remember(folder: Path) -> None:
    """Sizes and times of shards whose contents were just checked or written."""
    write_json(folder / "verified.json", {path.name: _stamp(path) for path in folder.glob("shard-*.safetensors")})


def _stamp(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def _rows_digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.input_ids, [int(s) for s in row.supervised]]).encode())
    return digest.hexdigest()[:16]


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"
