"""Prompts from files and the hub; features on disk that are never silently wrong."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from dspark_exp.data.anchors import draw_anchors
from dspark_exp.data.benchmarks import BenchmarkSpec, HubSource, benchmark_prompts, synthetic_prompts
from dspark_exp.data.feature_cache import FeatureCache
from dspark_exp.data.feature_store import ROWS_PER_SHARD, StoredRow, build_feature_store, pad_ids
from dspark_exp.data.rendering import Row
from dspark_exp.errors import ConfigError, DataError
from dspark_exp.objectives import BlockObjective
from dspark_exp.targets import Target
from dspark_exp.training.data_module import as_features, collate
from tests.conftest import make_drafter


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


def _build(root: Path, target: Target, rows: list[Row], **changes):
    settings = {"dtype": "float32", "max_gb": 1.0} | changes
    return build_feature_store(
        root, rows, target.features, target.fingerprint(), feature_size=4 * 128, batch_size=4,
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


def test_an_interrupted_build_goes_on(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(ROWS_PER_SHARD + 3)
    _build(tmp_path, tiny, rows)
    (folder,) = tmp_path.iterdir()
    (folder / "index.json").unlink()  # as after a kill: shards are there, the index is not
    (folder / "shard-00001.safetensors").unlink()
    kept = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    store = _build(tmp_path, tiny, rows)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == kept
    assert store[ROWS_PER_SHARD].taps is not None


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_corrupt_shard_is_named_and_computed_again(
    tmp_path: Path, tiny: Target, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = _rows(ROWS_PER_SHARD + 3)
    wanted = _build(tmp_path, tiny, rows)[0].taps.clone()
    (folder,) = tmp_path.iterdir()
    shard, other = folder / "shard-00000.safetensors", folder / "shard-00001.safetensors"
    kept = other.stat().st_mtime_ns
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content if damage == "flip" else content[:100])
    if damage == "delete":
        shard.unlink()
    torch.testing.assert_close(_build(tmp_path, tiny, rows)[0].taps, wanted, atol=0, rtol=0)
    assert "shard-00000" in caplog.text
    assert other.stat().st_mtime_ns == kept


def test_a_store_at_a_chosen_place_refuses_other_settings_by_name(tmp_path: Path, tiny: Target) -> None:
    place, rows = tmp_path / "mine", _rows(6)
    _build(tmp_path, tiny, rows, folder=place)
    with pytest.raises(DataError, match=r"feature_dtype was 'float32', now 'bfloat16'.*features\.dir"):
        _build(tmp_path, tiny, rows, folder=place, dtype="bfloat16")
    with pytest.raises(DataError, match="rows was"):
        _build(tmp_path, tiny, rows[:5], folder=place)


def test_the_least_recently_used_store_makes_room_unless_it_is_read(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(40)
    first = _build(tmp_path, tiny, rows)
    (oldest,) = tmp_path.iterdir()
    size = sum(path.stat().st_size for path in oldest.iterdir()) / 1e9
    second = _build(tmp_path, tiny, rows[:39], max_gb=1.5 * size)
    assert oldest.exists()  # ``first`` still reads it
    del second
    assert first[0].taps is not None
    del first
    gc.collect()
    _build(tmp_path, tiny, rows[:38], max_gb=2.5 * size)
    assert not oldest.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_stored_online_and_bounded_features_give_the_same_loss(tmp_path: Path, tiny: Target) -> None:
    rows = _rows(12)
    store = _build(tmp_path / "stored", tiny, rows)
    plain = [StoredRow(torch.tensor(r.input_ids), torch.tensor(r.supervised)) for r in rows]
    row_bytes = 30 * 4 * 128 * 4
    cache = FeatureCache(tmp_path / "bounded", tiny.features, 4 * row_bytes, torch.float32)
    drafter = make_drafter("dspark_markov", tiny).requires_grad_(False)
    losses = []
    for chosen in ([0, 1, 2], [3, 4, 5], [0, 1, 2], [2, 1, 0], [6, 7, 0]):
        batches = [collate([store[i] for i in chosen], 0)]
        for compute in (tiny.features, cache):
            batch = collate([plain[i] for i in chosen], 0)
            taps, final = compute(batch["input_ids"], batch["attention_mask"])
            batches.append(batch | {"taps": taps, "final": final})
        for batch in batches:
            features = as_features(batch)
            generator = torch.Generator().manual_seed(1)
            blocks = draw_anchors(features.input_ids, features.supervised, 4, 4, generator)
            output = drafter(features, blocks)
            losses.append(
                float(BlockObjective(0.1, 0.9, 1.0)(output, blocks, features, tiny.head, 1.0, lambda x: x).loss)
            )
    for stored, online, bounded in zip(losses[::3], losses[1::3], losses[2::3], strict=True):
        assert online == pytest.approx(stored, rel=1e-5)
        assert bounded == pytest.approx(stored, rel=1e-5)
    assert cache.num_hits > 0
    assert cache.num_misses > 6  # rows that had to leave were computed again
    assert sum(path.stat().st_size for path in (tmp_path / "bounded").iterdir()) <= 4 * row_bytes
    again = FeatureCache(tmp_path / "bounded", tiny.features, 4 * row_bytes, torch.float32)
    ids, mask = pad_ids([rows[0].input_ids], 0)
    again(ids, mask)
    assert (again.num_hits, again.num_misses) == (1, 0)


def test_an_unreadable_row_of_the_bounded_cache_is_computed_again(
    tmp_path: Path, tiny: Target, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FeatureCache(tmp_path, tiny.features, 10**9, torch.float32)
    ids, mask = pad_ids([list(range(10, 30))], 0)
    wanted, _ = cache(ids, mask)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(b"torn")
    torch.testing.assert_close(cache(ids, mask)[0], wanted, atol=0, rtol=0)
    assert "unreadable" in caplog.text


def test_a_store_beyond_its_budget_is_refused_before_any_work(tmp_path: Path, tiny: Target) -> None:
    with pytest.raises(ConfigError, match=r"features\.max_gb"):
        _build(tmp_path, tiny, _rows(6), max_gb=1e-6)
    assert not list(tmp_path.iterdir())
