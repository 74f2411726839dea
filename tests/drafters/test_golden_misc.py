"""Verification, confidence metrics and learning rates against ../shared/golden/trained/misc."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_exp.decoding.verification import verify_block
from dspark_exp.metrics import SurvivalCalibration
from dspark_exp.training import Optimization


@pytest.mark.parametrize("case", range(6))
def test_given_uniforms_accept_the_same_tokens_and_leave_the_same_distribution(golden: Path, case: int) -> None:
    stored = load_file(golden / "trained/misc/rejection.safetensors")
    io = {name.removeprefix(f"{case}."): tensor for name, tensor in stored.items() if name.startswith(f"{case}.")}
    grid = (torch.arange(20_000) + 0.5) / 20_000  # even draws of the next token recover its distribution
    many = [io[name].expand(len(grid), *io[name].shape[1:]) for name in ("draft_probs", "target_probs", "tokens")]
    lengths = io["effective_proposal_length"].expand(len(grid))
    verdict = verify_block(*many, lengths, io["uniform"].expand(len(grid), -1), grid)
    assert verdict.num_accepted.unique().tolist() == io["accepted"].tolist()
    meta = json.loads((golden / "trained/misc/meta.json").read_text())["rejection"]["cases"][str(case)]
    if meta["terminated_by_stop_token"]:
        return  # no token follows an end token, so there is no distribution to compare
    found = torch.bincount(verdict.next_token, minlength=32) / len(grid)
    torch.testing.assert_close(found, io["next_token_dist"][0].float(), atol=1e-4, rtol=0)


def test_confidence_metrics_equal_the_reference_by_position(golden: Path) -> None:
    io = load_file(golden / "trained/misc/confidence.safetensors")
    wanted = json.loads((golden / "trained/misc/meta.json").read_text())["confidence"]["per_position"]
    survival = io["prefix_probs"]
    conditional = survival / torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    metric = SurvivalCalibration(survival.shape[1])
    metric.update(conditional, io["prefix_labels"].clamp(min=0).sum(1).long(), io["num_valid"])
    sheet = metric.compute()
    for row in wanted:
        k = row["position"]
        assert sheet["counts"][k] == row["total_weight"]
        assert sheet["ece"][k] == pytest.approx(row["ece"], abs=1e-5)
        assert sheet["brier"][k] == pytest.approx(row["brier"], abs=1e-6)
        assert sheet["auroc"][k] == pytest.approx(row["auc"], abs=2e-3)  # the reference bins scores by 1,000
        assert [count for count, _, _ in sheet["bins"][k]] == [b["weight"] for b in row["reliability"]]


def test_learning_rates_follow_the_reference_without_its_overshoot(golden: Path) -> None:
    wanted = json.loads((golden / "trained/misc/meta.json").read_text())["lr_schedule"]["total100_ratio0.04"]
    rule = Optimization(6e-4, 100, 0.04)
    found = [6e-4 * rule.factor(step) for step in range(100)]
    assert found == pytest.approx(wanted, abs=2e-7)
    assert max(found) <= 6e-4 < max(wanted)  # the released schedule exceeds its base rate once
