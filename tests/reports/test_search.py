"""The report of a search: trials in order, the winner's options, and the same files from results.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_exp.reports.rebuild import rebuild
from dspark_exp.reports.search import best_first, build_search_report, overrides, trial


def _curve(*taus: float) -> list[dict[str, float]]:
    return [{"step": 100.0 * (index + 1), "tau": tau, "tau/math": tau} for index, tau in enumerate(taus)]


def _job(tau: float) -> dict[str, Any]:
    row = {
        "benchmark": "gsm8k",
        "domain": "math",
        "tau": tau,
        "emitted_by_prompt": [20, 30],
        "rounds_by_prompt": [10, 12],
    }
    return {"target": "tiny", "rows": [row], "provenance": {"device": "cpu"}}


def _build(folder: Path) -> dict[str, Any]:
    jobs = [_job(2.2), _job(2.4)]
    trials = [
        trial(0, {"trainer.lr": 0.00123456, "drafter.objective.ce": 0.5}, _curve(1.5, 2.0, 1.9), jobs[0]),
        trial(1, {"trainer.lr": 0.02, "drafter.objective.ce": 0.1}, _curve(2.9), None),
        trial(2, {"trainer.lr": 0.01, "drafter.objective.ce": 0.25}, _curve(1.6, 2.1, 2.3), jobs[1]),
    ]
    missing = [{"job": "trainer.lr=9", "reason": "the disk is full"}]
    return build_search_report(folder, "tune", "Which learning rate?", jobs, trials, missing)


def test_trials_are_ranked_and_those_ended_early_come_last(tmp_path: Path) -> None:
    results = _build(tmp_path / "tune" / "tiny")
    assert [one["trial"] for one in best_first(results)] == [2, 0, 1]
    assert [(one["val_tau"], one["val_step"], one["steps"]) for one in results["trials"]] == [
        (2.0, 200, 300), (2.9, 100, 100), (2.3, 300, 300),
    ]  # fmt: skip
    text = (tmp_path / "tune" / "tiny" / "report.md").read_text()
    assert "trainer.lr=0.01 drafter.objective.ce=0.25" in text
    assert "| 1 | 2.90 | ended at step 100 | 0.02 | 0.1 |" in text
    assert "1 of 3 trials were ended early" in text
    assert "78 % of the steps" in text  # 700 of 900
    assert "**missing: trainer.lr=9**: the disk is full" in text
    assert (tmp_path / "tune" / "tiny" / "tune.png").stat().st_size > 10_000


def test_a_report_is_rebuilt_from_its_results_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tune" / "tiny"
    _build(folder)
    before = {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".png"}
    for path in folder.iterdir():
        if path.name != "results.json":
            path.unlink()
    rebuilt, left = rebuild(tmp_path)
    assert (rebuilt, left) == ([folder], [])
    assert {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".png"} == before
    assert "tune on tiny" in (tmp_path / "index.html").read_text()


def test_options_are_written_as_they_are_typed() -> None:
    assert (
        overrides({"trainer.lr": 0.00512345, "drafter": "dflash", "seed": 3})
        == "trainer.lr=0.00512 drafter=dflash seed=3"
    )
    assert json.loads(json.dumps(trial(0, {}, _curve(1.0), None)))["pruned"]
