"""Recipes beside training: look at the data, estimate, prepare, export, start from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark_exp.config import resolved_dict, validated
from dspark_exp.errors import CheckpointError, ConfigError, DataError
from dspark_exp.interop import read_drafter
from dspark_exp.targets import load_target
from dspark_exp.tasks.auto_shard import choose_shard, with_shard, with_shard_chosen
from dspark_exp.tasks.building import build_drafter, open_target
from dspark_exp.tasks.estimate import estimate, measure_rows, on_meta, parameters, run_estimate
from dspark_exp.tasks.export import run_export
from dspark_exp.tasks.inspect_data import run_inspect_data
from dspark_exp.tasks.prepare_data import compute_of, run_prepare_data
from dspark_exp.tasks.train_eval import Job, train_eval
from tests.conftest import composed
from tests.training.conftest import SMALL

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "of course"}], "domain": "chat"},
    {"messages": [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "3 + 4 = 7"}], "domain": "math",
     "finished": False},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]},
    {"messages": [{"role": "tool", "content": "{}"}]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS * 6))


def _config(*overrides: str):
    return validated(composed(*SMALL, *overrides))


def _job(*overrides: str) -> Job:
    plain = composed(*SMALL, *overrides)
    return Job(validated(plain), resolved_dict(plain))


JSONL = ("data=jsonl", "data.path=rows.jsonl", "data.num_validation=2", "data.validation_max_new_tokens=4")


def test_inspect_data_counts_every_row_and_shows_what_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    run_inspect_data(_config(*JSONL, "inspect.num_rows=2"))
    shown = capsys.readouterr().out
    for expected in ("kept, chat", "kept, math", "dropped: empty assistant reply", "a turn of role tool", "Lengths"):
        assert expected in shown
    assert "of course<|end|>" in shown
    summary = json.loads(Path("outputs/inspect_data.json").read_text())
    assert summary["rows"] + sum(summary["dropped"].values()) == len(ROWS) * 6 - 2  # two are held out
    assert sum(b["rows"] for b in summary["lengths"]) == summary["rows"]


def test_features_of_other_settings_are_refused_by_name() -> None:
    run_prepare_data(_config("features.dir=mine"))
    with pytest.raises(DataError, match="max_length was 256, now 100"):
        run_prepare_data(_config("features.dir=mine", "data.max_length=100"))
    run_prepare_data(_config("features=bounded", "features.dir=rows"))
    compute_of(_config("features=bounded", "features.dir=rows"), load_target("tiny", "embedded", num_feature_layers=3))
    other = _config("features=bounded", "features.dir=rows", "target.layer_ids=[0,1]")
    fewer_taps = load_target("tiny", "embedded", layer_ids=[0, 1])
    with pytest.raises(DataError, match=r"layer_ids was \[1, 2, 3\], now \[0, 1\].*features\.dir"):
        compute_of(other, fewer_taps)


def test_too_many_dropped_rows_refuse_to_train() -> None:
    with pytest.raises(DataError, match=r"data\.max_dropped allows 10%.*inspect_data"):
        run_prepare_data(_config(*JSONL, "data.max_dropped=0.1"))


def test_prepare_data_leaves_what_training_will_read(caplog: pytest.LogCaptureFixture) -> None:
    run_prepare_data(_config())
    assert list(Path("outputs/cache/features").glob("*/index.json"))
    before = {path: path.stat().st_mtime_ns for path in Path("outputs/cache").rglob("*.safetensors")}
    run_prepare_data(_config())
    assert {path: path.stat().st_mtime_ns for path in Path("outputs/cache").rglob("*.safetensors")} == before


def test_an_estimate_of_disk_is_what_the_store_takes() -> None:
    config = _config(*JSONL)
    rows = measure_rows(config)
    assert rows.exact
    run_prepare_data(config)
    stored = sum(path.stat().st_size for path in Path("outputs/cache/features").rglob("*.safetensors"))
    target, drafter = on_meta(config)
    assert parameters(target.model) == parameters(load_target("tiny", "embedded").model)
    by_mode = {m: estimate(config, m, target, drafter, rows, 1e12, 100, 100) for m in ("stored", "bounded", "online")}
    features_gb = by_mode["stored"].disk_gb - by_mode["online"].disk_gb
    assert features_gb * 1e9 == pytest.approx(stored, rel=0.25)  # the file also has a header
    assert by_mode["online"].hours > 0
    assert not estimate(config, "stored", target, drafter, rows, 1e12, 0.0, 100).fits
    tight = _config(*JSONL, "features=bounded", "features.max_gb=0.000001")
    assert estimate(tight, "bounded", target, drafter, rows, 1e12, 100, 100).disk_gb < by_mode["stored"].disk_gb


def test_an_estimate_of_memory_knows_what_is_spread_over_ranks() -> None:
    def memory(*overrides: str) -> float:
        config = _config(*JSONL, "trainer.devices=8", *overrides)
        return estimate(config, "online", *on_meta(config), measure_rows(config), 1e12, 100, 100).memory_gb

    target, drafter = on_meta(_config(*JSONL))
    num_layers, in_layers = len(target.body.layers), parameters(target.body.layers)
    saved = memory() - memory("target.shard=fsdp")
    assert saved * 1e9 == pytest.approx(4 * in_layers * (1 - 1 / 8 - 2 / num_layers))
    saved = memory() - memory("target.shard=tensor_parallel")
    assert saved * 1e9 == pytest.approx(4 * in_layers * (1 - 1 / 8))
    saved = memory() - memory("trainer.strategy=fsdp")
    assert 8 * parameters(drafter) < saved * 1e9 < 14 * parameters(drafter)
    alone = memory("trainer.devices=1") - memory("trainer.devices=1", "trainer.strategy=fsdp")
    assert alone == 0


def test_an_automatic_shard_is_the_first_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = _config(*JSONL, "trainer.devices=2", "target.shard=auto")

    def needed(shard: str | None) -> float:
        held = with_shard(config, shard)
        return estimate(held, "stored", *on_meta(held), measure_rows(held), 1e12, 100, 100).memory_gb

    whole, cut, sharded = (needed(shard) for shard in (None, "tensor_parallel", "fsdp"))
    assert cut < sharded <= whole  # fsdp gathers two layers at a time, half of them here
    assert choose_shard(config, 10 * whole) is None
    assert choose_shard(config, 1.25 * (whole + cut) / 2) == "tensor_parallel"
    assert choose_shard(config, 0.1 * cut) == "tensor_parallel"  # nothing fits: the smallest, and a warning
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    odd = _config(*JSONL, "trainer.devices=3", "target.shard=auto")  # two key/value heads, three ranks
    assert choose_shard(odd, 1e-6) == "fsdp"
    assert with_shard_chosen(_config(*JSONL, "target.shard=auto")).target.shard is None  # one process holds it whole
    assert with_shard_chosen(_config(*JSONL, "target.shard=fsdp")).target.shard == "fsdp"


def test_an_estimate_is_printed_for_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    run_estimate(_config("drafter.init_from=not/there/yet"))
    shown = capsys.readouterr().out
    for expected in ("stored (chosen)", "bounded", "online", "this machine", "at most"):
        assert expected in shown
    assert {mode["mode"] for mode in json.loads(Path("outputs/estimate.json").read_text())["modes"]} == {
        "stored", "bounded", "online"
    }  # fmt: skip


@pytest.mark.slow
def test_a_trained_drafter_travels_out_and_back_in_with_the_same_numbers() -> None:
    steps = ("trainer.max_steps=4", "trainer.validate_every_steps=4", "tracking=none")
    trained = train_eval(_job(*steps))
    done = run_export(_job(*steps, "task=export", "export.dtype=float32", "export.dir=out"))
    assert done.manifest["source"].endswith("step 4")
    card = Path("out/README.md").read_text()
    assert f"{trained['rows'][0]['tau']:.2f}" in card
    again = train_eval(_job("trainer.max_steps=0", "tracking=none", "drafter.init_from=out"))
    assert [row["emitted_by_prompt"] for row in again["rows"]] == [row["emitted_by_prompt"] for row in trained["rows"]]
    assert [row["rounds_by_prompt"] for row in again["rows"]] == [row["rounds_by_prompt"] for row in trained["rows"]]
    tuned = train_eval(_job(*steps, "drafter.init_from=out"))
    assert tuned["training"]["steps"] == 4


def test_export_without_anything_to_export_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match=r"Train first.*checkpoint="):
        run_export(_job("task=export"))
    with pytest.raises(ConfigError, match=r"export\.dtype='int4'"):
        run_export(_job("task=export", "export.dtype=int4"))


def test_an_export_may_start_from_a_given_checkpoint_folder() -> None:
    first = run_export_of("dspark_markov", Path("a"))
    second = run_export(
        _job("task=export", "drafter.init_from=a", "export.to=vllm", "export.dtype=float32", "export.dir=b")
    )
    assert second.manifest["source"] == "a"
    assert first.max_logit_error < 1e-3
    assert "Not measured" in Path("b/README.md").read_text()


def run_export_of(drafter: str, folder: Path):
    from dspark_exp.interop import export_drafter

    config = _config(f"drafter={drafter}")
    target = open_target(config)
    return export_drafter(build_drafter(config, target), target, folder, reader="deepspec", dtype=torch.float32)


def test_init_from_another_shape_says_what_to_set() -> None:
    run_export_of("dspark_rnn", Path("rnn"))
    run_export_of("eagle3", Path("eagle"))
    target = open_target(_config())
    for overrides, message in (
        (("drafter=dspark_markov", "drafter.init_from=rnn"), r"network\.head=rnn.*drafter=dspark_rnn"),
        (("drafter=dspark_rnn", "drafter.init_from=rnn", "drafter.network.block_size=3"), r"block_size=\d \(now 3\)"),
        (("drafter=dspark_markov", "drafter.init_from=eagle"), "drafter=eagle3"),
        (("drafter=eagle3", "drafter.init_from=rnn"), "holds dspark"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_drafter(_config(*overrides), target)
    loaded = build_drafter(_config("drafter=dspark_rnn", "drafter.init_from=rnn"), target)
    wanted = read_drafter("rnn", target)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, wanted.state_dict()[name], atol=0, rtol=0)


def test_evaluating_without_training_needs_a_drafter() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.init_from"):
        _config("trainer.max_steps=0")
