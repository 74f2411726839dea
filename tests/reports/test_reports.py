"""A report says what was measured, what is missing, and rebuilds from results.json alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from dspark_exp.reports import build_report, pooled_by_domain
from dspark_exp.reports.build import write_files
from dspark_exp.reports.tables import gain, macro_averages


def _row(drafter: str, benchmark: str, domain: str, tau: float, seed: int = 0) -> dict:
    generator = np.random.default_rng(seed)
    rounds = generator.integers(8, 12, 10)
    emitted = np.round(rounds * tau).astype(int)
    return {
        "drafter": drafter, "benchmark": benchmark, "domain": domain, "tau": float(emitted.sum() / rounds.sum()),
        "tau_low": tau - 0.1, "tau_high": tau + 0.1, "acceptance_rate": 0.5, "verify_rate": 0.5,
        "conditional_acceptance": [0.9, 0.5, None], "position_counts": [100, 40, 0], "survival": [0.9, 0.2, 0.0],
        "rounds": int(rounds.sum()), "emitted_tokens": int(emitted.sum()), "drafted_per_round": 3.0,
        "verified_per_round": 3.0, "prompts": 10, "finished": 10, "emitted_by_prompt": emitted.tolist(),
        "rounds_by_prompt": rounds.tolist(), "tokens_per_s": 10.0, "draft_s_per_round": 0.1,
        "verify_s_per_round": 0.1, "extend_s_per_round": 0.1, "host_s_per_round": 0.1, "prefill_s": 0.1,
        "plain_tokens_per_s": 5.0, "speedup": 2.0,
    }  # fmt: skip


def _job(drafter: str, tau: float) -> dict:
    rows = [_row(drafter, "sums", "math", tau), _row(drafter, "loops", "code", tau / 2, 1)]
    trainer = {"lr": 1e-3, "batch_size": 2, "accumulate": 1, "num_anchors": 4, "objective_ramp": 0.7}
    return {
        "target": "tiny", "drafter": drafter, "rows": rows, "seconds": {"train": 3.0},
        "training": {
            "steps": 10, "selected_step": 10, "trainable_parameters": 5,
            "learning_curve": [{"step": s, "tau": tau * s / 10, "tau/math": tau * s / 10} for s in (5, 10)],
        },
        "provenance": {
            "trainer": trainer, "device": "cpu", "threads": 2, "target": {"dtype": "float32"},
            "code": {"revision": "abc", "version": "0"},
            "data": {
                "replies": "given",
                "train": {"rows": 3, "tokens": 30, "supervised_tokens": 9, "rows_by_domain": {}, "dropped": {}},
            },
            "evaluation": {"sampling": {"temperature": 1.0}, "max_new_tokens": 8},
        },
    }  # fmt: skip


def test_a_report_has_all_its_files_and_rebuilds_from_results_alone(tmp_path: Path) -> None:
    missing = [{"job": "eagle3-1", "reason": "out of memory"}]
    build_report(tmp_path / "a", "table1", [_job("dflash", 3.0), _job("dspark_markov", 4.0)], missing)
    text = (tmp_path / "a" / "report.md").read_text()
    assert "missing: eagle3-1**: out of memory" in text
    assert "dspark_markov over dflash" in text
    assert "the paper's own table 1" in text.lower()
    assert "6.11" in text
    report = json.loads((tmp_path / "a" / "results.json").read_text())
    (tmp_path / "b").mkdir()
    write_files(report, tmp_path / "b")
    for name in ("report.md", "table.csv", "positions.csv", "position.png", "learning.png"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    rows = list(csv.DictReader((tmp_path / "a" / "table.csv").open()))
    assert [row["tau"] for row in rows] == [str(row["tau"]) for row in report["rows"]]


def test_jobs_that_share_a_drafter_are_told_apart(tmp_path: Path) -> None:
    jobs = [{**_job("dflash", 3.0), "job": "dflash-a"}, {**_job("dflash", 4.0), "job": "dflash-b"}]
    report = build_report(tmp_path, "seeds", jobs)
    assert {row["drafter"] for row in report["rows"]} == {"dflash-a", "dflash-b"}
    assert set(report["training"]) == {"dflash-a", "dflash-b"}


def test_macro_averages_weigh_benchmarks_equally() -> None:
    rows = [_row("d", "a", "math", 2.0), _row("d", "b", "math", 4.0, 1), _row("d", "c", "chat", 1.0, 2)]
    means = macro_averages(rows)
    assert means["math"].tau == pytest.approx(np.mean([r["tau"] for r in rows[:2]]))
    assert means["all"].tau == pytest.approx(np.mean([r["tau"] for r in rows]))
    assert list(means) == ["math", "chat", "all"]
    value, low, high = gain(means["math"], means["chat"])
    assert low <= value <= high
    assert value == pytest.approx(means["math"].tau / means["chat"].tau - 1)


def test_positions_of_a_domain_are_pooled_by_counts() -> None:
    rows = [_row("d", "a", "math", 2.0), _row("d", "b", "math", 2.0)]
    rows[1] |= {"conditional_acceptance": [0.5, 1.0, None], "position_counts": [300, 40, 0]}
    line = pooled_by_domain(rows)["math"]
    assert line.conditional[0] == pytest.approx((0.9 * 100 + 0.5 * 300) / 400)
    assert line.counts == [400, 80, 0]
    assert line.conditional[2] is None
    assert line.low[0] < line.conditional[0] < line.high[0]


def test_positions_that_few_rounds_reached_are_not_shown() -> None:
    rows = [_row("d", "a", "math", 2.0) | {"conditional_acceptance": [0.9, 1.0, None], "position_counts": [99, 2, 0]}]
    line = pooled_by_domain(rows)["math"]
    assert line.conditional[1] == 1.0
    assert line.shown == [pytest.approx(0.9), None, None]
