"""A sweep meets a disk that is full: the job says so, nothing is corrupt, the same command goes on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_exp.data import feature_store
from dspark_exp.data.feature_store import build_feature_store
from dspark_exp.data.rendering import Row
from dspark_exp.tasks.sweep import _reason

ROWS = [Row([2 + (index + step) % 7 for step in range(9)], [True] * 9) for index in range(600)]


def _features(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ids[..., None].float().expand(*ids.shape, 2), mask[..., None].float()


def _build(root: Path, calls: list[int]) -> Any:
    def compute(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(ids))
        return _features(ids, mask)

    return build_feature_store(
        root, ROWS, compute, {}, feature_size=3, dtype="float32", max_gb=1.0, batch_size=300,
        device=torch.device("cpu"), pad_id=0,
    )  # fmt: skip


def test_a_full_disk_is_named_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = feature_store.save_file, []

    def full_after_one(tensors: dict[str, Tensor], path: Path) -> None:
        if written:
            path.write_bytes(b"the beginning of a shard")
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(tensors, path)

    monkeypatch.setattr(feature_store, "save_file", full_after_one)
    calls: list[int] = []
    with pytest.raises(OSError, match="No space left") as caught:
        _build(tmp_path, calls)
    assert _reason(caught.value).startswith("the disk is full; make room")
    assert calls == [256, 256]
    monkeypatch.setattr(feature_store, "save_file", write)
    store = _build(tmp_path, calls)
    assert calls == [256, 256, 256, 88]  # the first shard was kept, the torn one and the last are computed
    assert [store[index].input_ids.tolist() for index in (0, 300, 599)] == [ROWS[i].input_ids for i in (0, 300, 599)]
    assert not list(tmp_path.glob("*/*.partial"))
