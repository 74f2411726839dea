"""Exports read back by an independent reader, in the conventions of each engine; refusals give their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_exp.calibration import Calibration
from dspark_exp.errors import CheckpointError
from dspark_exp.interop import READERS, draft_greedily, export_drafter, layout_for, read_config, read_drafter
from dspark_exp.interop import export as export_module
from dspark_exp.scheduling import CapacityTable, read_table
from dspark_exp.targets import Target
from tests.conftest import make_drafter, random_target

DRAFTERS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3")
TARGETS = ("qwen3", "llama", "gemma4")
REFUSED = {
    ("vllm", "dspark_gated"): "vanilla Markov head only",
    ("vllm", "dspark_rnn"): "vanilla Markov head only",
    ("sglang", "eagle3"): "drops the query and key norms",
}


def _refusal(reader: str, kind: str, family: str) -> str | None:
    if family == "gemma4" and reader != "deepspec":
        if reader == "sglang" and kind != "eagle3":
            return "no confirmed drafter class for Gemma 4"
        if reader == "speculators":
            return "no Gemma 4 drafter layers"
        if kind == "eagle3" and reader == "vllm":
            return "no class for Eagle3 drafters with Gemma 4"
    return REFUSED.get((reader, kind))


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {family: random_target(family, vocab_size=40) for family in TARGETS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("family", TARGETS)
def test_every_export_reads_back_or_is_refused_with_its_reason(
    targets, tmp_path: Path, family: str, reader: str, kind: str, dtype: torch.dtype
) -> None:
    target = targets[family]
    drafter = make_drafter(kind, target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    reason = _refusal(reader, kind, family)
    if reason is not None:
        with pytest.raises(CheckpointError, match=reason):
            export_drafter(drafter, target, tmp_path / "out", reader=reader, dtype=dtype)
        assert not list(tmp_path.iterdir())
        return
    done = export_drafter(drafter, target, tmp_path / "out", reader=reader, dtype=dtype)
    assert done.max_logit_error < 1e-3
    assert {p.name for p in done.folder.iterdir()} >= {"config.json", "export_manifest.json", "golden.safetensors"}
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)  # rounding was for the check alone


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_layer_ids_follow_each_readers_convention(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]  # taps decoder layers 0, 1, 2
    written = {}
    for reader, kind in (("deepspec", "dspark_markov"), ("speculators", "dspark_markov"), ("vllm", "dspark_markov"),
                         ("sglang", "dspark_markov"), ("vllm", "eagle3"), ("speculators", "eagle3")):  # fmt: skip
        folder = tmp_path / f"{reader}-{kind}"
        export_drafter(make_drafter(kind, target), target, folder, reader=reader)
        written[reader, kind] = _config(folder)
    assert written["deepspec", "dspark_markov"]["target_layer_ids"] == [0, 1, 2]
    assert written["vllm", "dspark_markov"]["target_layer_ids"] == [0, 1, 2]
    assert written["vllm", "dspark_markov"]["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert written["sglang", "dspark_markov"]["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert written["speculators", "dspark_markov"]["aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert written["speculators", "eagle3"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    eagle = written["vllm", "eagle3"]
    assert (eagle["architectures"], eagle["eagle_aux_hidden_state_layer_ids"]) == (
        ["Eagle3Qwen3ForCausalLM"],
        [1, 2, 3],
    )
    assert "target_layer_ids" not in eagle
    manifest = json.loads((tmp_path / "vllm-eagle3" / "export_manifest.json").read_text())
    assert manifest["layer_ids"]["decoder_layers"] == [0, 1, 2]
    assert manifest["layer_ids"]["meaning"].startswith("1 + the 0-based decoder layer")


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("reader", ["speculators", "vllm"])
def test_a_writer_that_is_off_by_one_layer_is_caught(targets, tmp_path: Path, monkeypatch, reader: str, shift) -> None:
    honest = layout_for

    def wrong(name, drafter, target):
        layout = honest(name, drafter, target)
        for place in (layout.config, layout.config.get("dflash_config", {})):
            for field in ("aux_hidden_state_layer_ids", "target_layer_ids"):
                if field in place:
                    place[field] = [max(0, i + shift) for i in place[field]]
        return layout

    monkeypatch.setattr(export_module, "layout_for", wrong)
    target = targets["qwen3"]
    with pytest.raises(CheckpointError, match=r"does not read back.*Nothing was kept"):
        export_drafter(make_drafter("dspark_markov", target), target, tmp_path / "out", reader=reader)
    assert not list(tmp_path.iterdir())


def test_dflash_travels_as_dspark_with_a_head_of_zeros(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    drafter = make_drafter("dflash", target)
    export_drafter(drafter, target, tmp_path / "out", reader="sglang", dtype=torch.float32)
    config, weights = _config(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert (config["markov_rank"], config["enable_confidence_head"]) == (16, False)
    assert not weights["markov_head.markov_w2.weight"].any()
    assert not {"embed_tokens.weight", "lm_head.weight"} & weights.keys()  # SGLang uses the target's


def test_what_ships_beside_the_weights(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    drafter = make_drafter("dspark_markov", target)
    export_drafter(drafter, target, tmp_path / "out", reader="vllm", source="run 7", model_card="# card\n")
    manifest = json.loads((tmp_path / "out" / "export_manifest.json").read_text())
    assert manifest["source"] == "run 7"
    assert manifest["num_speculative_tokens"] == drafter.block_size
    assert manifest["mask_token_id"] == target.facts.mask_token_id
    assert set(manifest["files_sha256"]) == {
        "config.json", "model.safetensors", "golden.safetensors", "sts.json", "README.md"
    }  # fmt: skip
    calibration = json.loads((tmp_path / "out" / "sts.json").read_text())
    assert calibration["temperatures"] == calibration["sts_temperatures"] == [1.0] * drafter.block_size
    golden = load_file(tmp_path / "out" / "golden.safetensors")
    assert golden["0.draft_tokens"].tolist() == golden["0.draft_logits"].argmax(-1).tolist()
    with pytest.raises(CheckpointError, match="exists"):
        export_drafter(drafter, target, tmp_path / "out", reader="vllm")


def test_calibration_and_capacity_ship_in_the_engines_own_fields(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    drafter = make_drafter("dspark_markov", target)
    calibration = Calibration((1.5,) * drafter.block_size, "chat", "abc", 400)
    capacity = CapacityTable([1, 2, 8], [64], [[0.01, 0.011, 0.02]], [[0.0] * 3], {}, {"device": "here"})
    export_drafter(drafter, target, tmp_path / "out", reader="sglang", calibration=calibration, capacity=capacity)
    sts, sps = (json.loads((tmp_path / "out" / name).read_text()) for name in ("sts.json", "sps.json"))
    assert sts["temperatures"] == [1.5] * drafter.block_size
    assert sps["sample_batch_tokens"] == [1, 2, 8]
    assert sps["sample_steps_per_sec"] == pytest.approx([100, 1 / 0.011, 50])
    assert sps["max_batch_tokens"] == 8
    assert read_table(tmp_path / "out" / "sps.json").seconds == capacity.seconds
    manifest = json.loads((tmp_path / "out" / "export_manifest.json").read_text())
    assert "400 rounds of chat (abc)" in manifest["calibration"]
    assert "here" in manifest["capacity_curve"]


def test_shards_read_back_as_one(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    drafter = make_drafter("dspark_rnn", target)
    export_drafter(drafter, target, tmp_path / "out", reader="deepspec", dtype=torch.float32, shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again = read_drafter(tmp_path / "out", target)
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=0, rtol=0)


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_round_trip_through_the_released_layout_changes_nothing(targets, tmp_path, family: str, kind: str) -> None:
    target = targets[family]
    drafter = make_drafter(kind, target)
    export_drafter(drafter, target, tmp_path / "out", reader="deepspec", dtype=torch.float32)
    again = read_drafter(tmp_path / "out", target).eval()
    ids = [3, 1, 4, 1, 5, 9]
    ours, theirs = draft_greedily(drafter, target, ids), draft_greedily(again, target, ids)
    assert ours.tokens == theirs.tokens
    torch.testing.assert_close(ours.logits, theirs.logits, atol=0, rtol=0)


def _broken(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_checkpoint_that_does_not_fit_is_refused_by_naming_the_tensor(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    changes = {
        "lacks tensor backbone.fc.weight": lambda w: w.pop("fc.weight"),
        "has the unexpected tensor stray.weight": lambda w: w.update({"stray.weight": torch.zeros(2)}),
        "another shape for tensor backbone.norm.weight": lambda w: w.update({"norm.weight": torch.zeros(3)}),
        "lm_head.weight is not the target's": lambda w: w["lm_head.weight"].add_(1.0),
    }
    for number, (message, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        export_drafter(make_drafter("dspark_markov", target), target, folder, reader="deepspec")
        _broken(folder, change)
        with pytest.raises(CheckpointError, match=message):
            read_drafter(folder, target)


def test_embedding_and_head_may_be_borrowed(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    export_drafter(make_drafter("dspark_markov", target), target, tmp_path / "out", reader="deepspec")
    _broken(tmp_path / "out", lambda w: [w.pop("embed_tokens.weight"), w.pop("lm_head.weight")])
    read_drafter(tmp_path / "out", target)


def test_a_checkpoint_of_other_layers_or_mask_says_what_to_set(targets, tmp_path: Path) -> None:
    target = targets["qwen3"]
    export_drafter(make_drafter("dspark_markov", target), target, tmp_path / "out", reader="deepspec")
    path = tmp_path / "out" / "config.json"
    original = _config(tmp_path / "out")
    for change, message in (
        ({"target_layer_ids": [0, 2, 3]}, r"target\.layer_ids=\[0, 2, 3\]"),
        ({"mask_token_id": 7}, r"target\.mask_token_id=7"),
        ({"architectures": ["OtherModel"]}, "'OtherModel' cannot be read"),
        ({"architectures": ["Gemma4DSparkModel"]}, "has gemma4 layers"),
    ):
        path.write_text(json.dumps(original | change))
        with pytest.raises(CheckpointError, match=message):
            read_drafter(tmp_path / "out", target)
    del original["block_size"]
    path.write_text(json.dumps(original))
    with pytest.raises(CheckpointError, match="block_size"):
        read_config(tmp_path / "out")
    with pytest.raises(CheckpointError, match="No drafter checkpoint"):
        read_config("/nowhere/at all")


def test_gemma3_and_unknown_readers_are_refused(tmp_path: Path) -> None:
    target = random_target("gemma3", vocab_size=40)
    with pytest.raises(CheckpointError, match="Gemma 3"):
        export_drafter(make_drafter("dflash", target), target, tmp_path / "out", reader="vllm")
    with pytest.raises(CheckpointError, match="deepspec, speculators, vllm, sglang"):
        export_drafter(make_drafter("dflash", target), target, tmp_path / "out", reader="gguf")


def test_a_bfloat16_target_exports_without_a_tolerance_for_its_rounding(tmp_path: Path) -> None:
    target = random_target("llama", vocab_size=40)
    target.model.to(torch.bfloat16)
    drafter = make_drafter("dspark_markov", target)
    done = export_drafter(drafter, target, tmp_path / "out", reader="deepspec")
    assert done.max_logit_error < 1e-3
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_a_windowed_drafter_is_refused_by_every_reader(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter("dspark_markov", target)
    drafter.backbone.window = 16
    for reader in ("deepspec", "vllm", "sglang", "speculators"):
        with pytest.raises(CheckpointError, match=r"drafter\.network\.window=16"):
            export_drafter(drafter, target, tmp_path / reader, reader=reader)
        assert not (tmp_path / reader).exists()
