"""Verdicts on load tests against numbers worked out by hand or by scipy's own paired test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dspark_exp.reports.load import frontier_verdicts, write_pareto


def _row(arm: str, runs: list[float], per_user: float, concurrency: int = 4) -> dict[str, Any]:
    return {
        "arm": arm,
        "concurrency": concurrency,
        "runs": runs,
        "throughput": float(np.median(runs)),
        "throughput_low": min(runs),
        "throughput_high": max(runs),
        "tokens_per_s_per_user": per_user,
        "verified_per_round": 1.0,
    }


def test_an_arm_is_better_only_beyond_the_noise_and_for_each_user_too() -> None:
    ours = _row("async_scheduler", [100.0, 80.0, 120.0, 90.0], 10.0)
    drifting = np.array(ours["runs"])
    rows = [
        ours,
        _row("plain", [101.0, 79.0, 121.0, 91.0], 11.0),  # faster in three runs of four: noise
        _row("fixed", (drifting * [1.05, 1.06, 1.05, 1.06]).tolist(), 11.0),  # always
        _row("threshold", (drifting * 1.2).tolist(), 9.0),  # for all together, not for each
    ]
    (verdict,) = frontier_verdicts(rows)
    assert verdict["better"] == ["fixed"]
    logs = np.log(drifting / np.array(rows[2]["runs"]))
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    found = verdict["against_simple"]
    assert (found.low, found.mean, found.high) == pytest.approx((np.exp(low), np.exp(logs.mean()), np.exp(high)))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([99.0, 99.2, 98.8], "at most 3 % below the better of plain and fixed."),
        ([95.0, 95.2, 94.8], "more than 3 % below at 4 users"),
        ([99.0, 92.0, 103.0], "at most 3 % below is not shown at 4 users"),
        ([99.0], "at most 3 % below is not shown at 4 users"),
    ],
)
def test_the_report_says_what_the_runs_show(tmp_path: Path, ours: list[float], said: str) -> None:
    rows = [_row("plain", [100.0] * len(ours), 11.0), _row("async_scheduler", ours, 10.0)]
    results = {"experiment": "pareto", "target": "tiny", "drafter": "x", "checkpoint": "y", "rows": rows}
    assert said in write_pareto(tmp_path, results).read_text()
