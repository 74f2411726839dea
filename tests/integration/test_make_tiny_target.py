"""A miniature embedded target, rebuilt from nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_exp.targets import load_target
from dspark_exp.tasks.make_tiny_target import TinyTargetConfig, make_tiny_target


@pytest.mark.slow
def test_a_miniature_target_is_rebuilt_and_learns(tmp_path: Path) -> None:
    config = TinyTargetConfig(
        vocab_size=600, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=64,
        num_steps=60, batch_size=16, lr=1e-2, num_heldout_per_benchmark=3,
    )  # fmt: skip
    report = make_tiny_target(config, tmp_path / "target", tmp_path / "report")
    assert report["vocab_size"] == 600
    for row in report["domains"].values():
        assert row["language_perplexity"] <= row["perplexity"] < 100  # untrained: 600
    assert json.loads((tmp_path / "report" / "results.json").read_text()) == report
    assert "of the language itself" in (tmp_path / "report" / "report.md").read_text()
    target = load_target("mini", str(tmp_path / "target"), num_feature_layers=2)
    assert target.facts.num_layers == 3
    assert target.facts.mask_token_id not in target.facts.stop_ids
