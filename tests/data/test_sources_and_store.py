"""Prompts from files and the hub; features on disk that are never silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark_exp.data.feature_store import ROWS_PER_SHARD, build_feature_store
from dspark_exp.data.rendering import Row
from dspark_exp.data.sources import BenchmarkSpec, HubSource, benchmark_prompts, synthetic_prompts
from dspark_exp.errors import ConfigError, DataError
from dspark_exp.targets import Target


def test_the_first_prompts_are_the_same_prompts_for_any_count(tmp_path: Path) -> None:
    rows = [json.dumps({"turns": [f"question {i}", "second turn"]}) for i in range(50)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    specs = {"gsm8k": BenchmarkSpec("math", num_prompts=40)}
    few, many = (benchmark_prompts(specs, str(tmp_path), n)["gsm8k"] for n in (5, 500))
    assert many[:5] == few
    assert len(many) == 40
    assert all("second" not in p.messages[0]["content"] for p in many)


def test_all_missing_benchmark_files_are_named_at_once(tmp_path: Path) -> None:
    specs = {name: BenchmarkSpec("math") for name in ("gsm8k", "math500")}
    with pytest.raises(DataError, match="gsm8k, math500"):
        benchmark_prompts(specs, str(tmp_path), 3)


def test_hub_prompts_come_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    (tmp_path / "rows.jsonl").write_text('{"question": "2+2"}\n{"question": "3+3"}\n')
    real = datasets.load_dataset

    def local(name: str, config: str | None, split: str):
        assert (name, config, split) == ("openai/gsm8k", "main", "test")
        return real("json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    spec = BenchmarkSpec("math", HubSource("openai/gsm8k", "test", "question", config="main", suffix="!"))
    prompts = benchmark_prompts({"gsm8k": spec}, None, 9)["gsm8k"]
    assert {p.messages[0]["content"] for p in prompts} == {"2+2!", "3+3!"}


def test_synthetic_prompts_do_not_repeat() -> None:
    prompts = synthetic_prompts(["loops", "thanks"], "evaluation", 20)
    for name in prompts:
        assert len({p.messages[0]["content"] for p in prompts[name]}) == 20


def _rows(count: int) -> list[Row]:
    return [Row(list(range(10 + i % 7, 30)), [False] * 5 + [True] * (15 - i % 7)) for i in range(count)]


def _build(folder: Path, target: Target, rows: list[Row], **changes):
    settings = {"dtype": "float32", "max_gb": 1.0} | changes
    return build_feature_store(
        folder, rows, target.features, target.fingerprint(), feature_size=4 * 128, batch_size=4,
        device=torch.device("cpu"), pad_id=0, **settings,
    )  # fmt: skip


def test_stored_features_equal_computed_ones_row_by_row(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(ROWS_PER_SHARD + 3)
    store = _build(tmp_path, tiny, rows)
    assert len(store) == len(rows)
    for index in (0, 5, ROWS_PER_SHARD - 1, ROWS_PER_SHARD, ROWS_PER_SHARD + 2):
        ids = torch.tensor([rows[index].input_ids])
        taps, final = tiny.features(ids, torch.ones_like(ids))
        item = store[index]
        assert item.input_ids.tolist() == rows[index].input_ids
        assert item.supervised.tolist() == rows[index].supervised
        torch.testing.assert_close(item.taps, taps[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(item.final, final[0], atol=2e-5, rtol=1e-4)


def test_the_same_rows_are_computed_once_and_other_settings_get_their_own_store(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(6)
    _build(tmp_path, tiny, rows)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    _build(tmp_path, tiny, rows)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == before
    _build(tmp_path, tiny, rows, dtype="bfloat16")
    _build(tmp_path, tiny, rows[:5])
    assert len(list(tmp_path.iterdir())) == 3


def test_an_interrupted_build_goes_on_and_a_corrupt_shard_is_named(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(ROWS_PER_SHARD + 3)
    _build(tmp_path, tiny, rows)
    (folder,) = tmp_path.iterdir()
    (folder / "index.json").unlink()  # as after a kill: shards are there, the index is not
    (folder / "shard-00001.safetensors").unlink()
    kept = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    store = _build(tmp_path, tiny, rows)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == kept
    assert store[ROWS_PER_SHARD].taps is not None
    shard = folder / "shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    (folder / "verified").unlink()
    with pytest.raises(DataError, match="shard-00000"):
        _build(tmp_path, tiny, rows)
    assert _build(tmp_path, tiny, rows)[0].taps is not None


def test_a_store_beyond_its_budget_is_refused_before_any_work(tmp_path: Path, tiny: Target) -> None:
    with pytest.raises(ConfigError, match=r"features\.max_gb"):
        _build(tmp_path, tiny, _rows(6), max_gb=1e-6)
    assert not list(tmp_path.iterdir())
