"""Worked examples of the metric sheet, and naive loops over random rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dspark_exp.decoding import Clock, Generation, Round
from dspark_exp.errors import ConfigError
from dspark_exp.metrics import (
    AcceptanceByPosition,
    AcceptedLength,
    SurvivalCalibration,
    interval,
    resampled_ratios,
)
from dspark_exp.tasks.evaluate import metric_row


def test_accepted_length_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    metric = AcceptedLength()
    metric.update(torch.tensor([8]))  # a prompt of one round
    metric.update(torch.tensor([1, 1, 2]))  # a prompt of three
    assert metric.compute().item() == 12 / 4


def test_conditional_acceptance_counts_only_rounds_that_reached_the_position() -> None:
    metric = AcceptanceByPosition(3)
    # accepted 3 of 3; rejected at 2; rejected at 1; verified only one token and accepted it
    metric.update(torch.tensor([3, 1, 0, 1]), torch.tensor([3, 3, 3, 1]))
    sheet = metric.compute()
    assert sheet["counts"].tolist() == [4, 2, 1]
    assert sheet["conditional"].tolist() == [3 / 4, 1 / 2, 1.0]
    assert sheet["survival"].tolist() == [3 / 4, 1 / 3, 1 / 3]


def test_acceptance_by_position_equals_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    verified = torch.randint(0, 6, (200,), generator=generator)
    accepted = (torch.rand(200, generator=generator) * (verified + 1)).long()
    metric = AcceptanceByPosition(5)
    for first in range(0, 200, 37):
        metric.update(accepted[first : first + 37], verified[first : first + 37])
    sheet = metric.compute()
    for k in range(1, 6):
        reached = [(a, v) for a, v in zip(accepted.tolist(), verified.tolist(), strict=True) if v >= k and a >= k - 1]
        assert sheet["counts"][k - 1] == len(reached)
        if reached:
            assert sheet["conditional"][k - 1].item() == pytest.approx(sum(a >= k for a, _ in reached) / len(reached))


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        AcceptanceByPosition(0)


def test_survival_calibration_equals_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    confidence = torch.rand(400, 3, generator=generator)
    verified = torch.full((400,), 3)
    accepted = (torch.rand(400, 3, generator=generator) < confidence).long().cumprod(1).sum(1)
    metric = SurvivalCalibration(3)
    metric.update(confidence[:150], accepted[:150], verified[:150])
    metric.update(confidence[150:], accepted[150:], verified[150:])
    sheet = metric.compute()
    survival = confidence.double().cumprod(1).numpy()
    for k in range(3):
        p, y = survival[:, k], (accepted > k).numpy().astype(float)
        bins = np.minimum((p * 20).astype(int), 19)
        ece = sum(abs(p[bins == b].mean() - y[bins == b].mean()) * (bins == b).mean() for b in set(bins))
        rows = sheet["bins"][k]
        assert sum(count for count, _, _ in rows) == 400
        assert sheet["ece"][k] == pytest.approx(sum(n * abs(a - b) for n, a, b in rows) / 400, abs=1e-5)
        pairs = [(float(a > b) + 0.5 * float(a == b)) for a in p[y == 1] for b in p[y == 0]]
        assert sheet["ece"][k] == pytest.approx(ece, abs=1e-5)
        assert sheet["auroc"][k] == pytest.approx(np.mean(pairs), abs=1e-5)
        assert sheet["brier"][k] == pytest.approx(((p - y) ** 2).mean(), abs=1e-5)


def test_survival_is_judged_at_verified_positions_only() -> None:
    metric = SurvivalCalibration(2)
    metric.update(torch.tensor([[0.9, 0.9], [0.1, 0.1], [0.5, 0.5]]), torch.tensor([1, 0, 1]), torch.tensor([1, 2, 2]))
    sheet = metric.compute()
    assert sheet["counts"] == [3, 2]
    assert math.isnan(sheet["auroc"][1])  # one outcome only


def test_bootstrap_covers_the_ratio_and_narrows_with_prompts() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        rounds = generator.integers(5, 15, count)
        emitted = (rounds * generator.uniform(2, 4, count)).round()
        low, high = interval(resampled_ratios(emitted, rounds))
        assert low < emitted.sum() / rounds.sum() < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 5


def test_the_metric_sheet_of_a_worked_example() -> None:
    generations = [
        Generation([1, 2, 3, 4, 5], [Round(4, 4, 2, 3), Round(4, 4, 0, 1)], "length"),
        Generation([1, 2], [Round(4, 4, 1, 1)], "stop"),  # the accepted token was the end token
    ]
    row = metric_row(generations, 4, Clock(draft_s=0.3, verify_s=0.6, total_s=1.0))
    assert row["tau"] == pytest.approx(5 / 3)
    assert row["acceptance_rate"] == pytest.approx(3 / 12)
    assert row["verify_rate"] == pytest.approx((5 / 3) / 5)
    assert row["position_counts"] == [3, 2, 1, 0]
    assert row["conditional_acceptance"] == [2 / 3, 1 / 2, 0.0, None]
    assert row["finished"] == 1
    assert row["tokens_per_s"] == pytest.approx(7.0)
    assert row["draft_s_per_round"] == pytest.approx(0.1)
    assert row["host_s_per_round"] == pytest.approx(0.1 / 3)
