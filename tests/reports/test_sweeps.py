"""Sweep reports: arms, intervals over runs, verdicts, rebuilt from results.json alone; the index page joins them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dspark_exp.errors import DataError
from dspark_exp.reports import build_sweep_report
from dspark_exp.reports.claims import judge, percent, table1_verdicts
from dspark_exp.reports.intervals import Interval
from dspark_exp.reports.rebuild import rebuild
from dspark_exp.reports.sweeps import arm_label, arms_of, verdicts_of

TAUS = {("dspark_markov", 2): (4.0, 4.2, 4.1), ("dspark_markov", 5): (4.4, 4.5, 4.6), ("dflash", 5): (3.0, 3.3, 3.1)}
CLAIMS = [
    {
        "text": "two layers against five",
        "first": {"drafter.name": "dspark_markov", "layers": 2},
        "second": {"drafter.name": "dflash", "layers": 5},
    },
    {
        "text": "deeper is no better than equal",
        "kind": "equal_within",
        "margin": 0.05,
        "first": {"drafter.name": "dspark_markov", "layers": 5},
        "second": {"drafter.name": "dspark_markov", "layers": 2},
    },
    {
        "text": "of an arm that did not run",
        "first": {"drafter.name": "dspark_markov", "layers": 9},
        "second": {"drafter.name": "dflash", "layers": 5},
    },
]
ABOUT = {"x": "layers", "lines": ["drafter.name"], "question": "How deep?", "claims": CLAIMS, "plan": False}


def _job(drafter: str, layers: int, seed: int, tau: float) -> tuple[dict[str, Any], dict[str, Any]]:
    rounds = np.array([10, 12, 9, 11])
    row = {
        "drafter": drafter, "benchmark": "b", "domain": "math", "tau": tau, "conditional_acceptance": [0.9, 0.8],
        "position_counts": [42, 35], "emitted_by_prompt": (rounds * tau).tolist(), "rounds_by_prompt": rounds.tolist(),
        "rounds": 42, "emitted_tokens": 42 * tau,
    }  # fmt: skip
    evaluation = {"sampling": {"temperature": 1.0}, "max_new_tokens": 32}
    job = {
        "target": "tiny", "drafter": drafter, "job": f"{drafter}-{layers}-{seed}",
        "rows": [row, {**row, "benchmark": "c"}],
        "training": {"trainable_parameters": 10 * layers, "steps": 7}, "seconds": {"train": 2.0},
        "provenance": {"evaluation": evaluation, "device": "cpu", "code": {"revision": "abc"}},
    }  # fmt: skip
    return job, {"drafter.name": drafter, "layers": layers, "seed": seed, "trainer.lr": 0.1}


def _report(folder: Path, seeds: int = 3) -> dict[str, Any]:
    made = [_job(*arm, seed, taus[seed]) for arm, taus in TAUS.items() for seed in range(seeds)]
    jobs, options = ([pair[part] for pair in made] for part in (0, 1))
    missing = [{"job": "layers=9", "reason": "out of memory"}]
    return build_sweep_report(folder, "depth", ABOUT, jobs, options, missing)


def test_arms_are_runs_that_differ_in_seed_alone_with_students_interval(tmp_path: Path) -> None:
    arms = arms_of(_report(tmp_path))
    assert [len(arm.runs) for arm in arms] == [3, 3, 3]
    for arm, taus in zip(arms, TAUS.values(), strict=True):
        low, high = stats.t.interval(0.95, 2, np.mean(taus), stats.sem(taus))
        tau = arm.tau("all")
        assert (tau.mean, tau.low, tau.high) == pytest.approx((np.mean(taus), low, high))


def test_another_option_that_was_swept_makes_arms_of_its_own(tmp_path: Path) -> None:
    made = [_job("dflash", 5, seed, 3.0 + lr) for lr in (0.1, 0.2) for seed in (0, 1)]
    jobs, options = ([pair[part] for pair in made] for part in (0, 1))
    for one, lr in zip(options, (0.1, 0.1, 0.2, 0.2), strict=True):
        one["trainer.lr"] = lr
    results = build_sweep_report(tmp_path, "depth", ABOUT, jobs, options, [])
    arms = arms_of(results)
    assert [arm_label(arm, results) for arm in arms] == [f"dflash, layers 5, lr {lr}" for lr in (0.1, 0.2)]
    assert [arm.tau("all").mean for arm in arms] == pytest.approx([3.1, 3.2])


def test_claims_are_judged_on_differences_run_by_run(tmp_path: Path) -> None:
    results = _report(tmp_path)
    first, second, third = verdicts_of(results, arms_of(results))
    ratios = [a / b - 1 for a, b in zip(TAUS["dspark_markov", 2], TAUS["dflash", 5], strict=True)]
    low, high = stats.t.interval(0.95, 2, np.mean(ratios), stats.sem(ratios))
    assert first.difference is not None
    assert (first.difference.low, first.difference.high) == pytest.approx((low, high))
    assert first.verdict == "shown"
    assert second.verdict == "not shown"
    assert (third.verdict, third.difference) == ("missing", None)


def test_a_single_run_has_an_interval_over_prompts(tmp_path: Path) -> None:
    results = _report(tmp_path, seeds=1)
    first = verdicts_of(results, arms_of(results))[0]
    assert first.difference is not None
    assert first.num_runs == 1
    assert first.difference.low <= first.difference.mean <= first.difference.high


@pytest.mark.parametrize(
    ("low", "high", "margin", "expected"),
    [
        (0.1, 0.2, 0.0, "shown"), (-0.1, 0.2, 0.0, "not shown"), (-0.2, -0.1, 0.0, "contradicted"),
        (-0.02, 0.03, 0.05, "shown"), (-0.02, 0.06, 0.05, "not shown"), (0.06, 0.09, 0.05, "contradicted"),
    ],
)  # fmt: skip
def test_a_claim_is_shown_where_the_whole_interval_is_on_its_side(
    low: float, high: float, margin: float, expected: str
) -> None:
    assert judge(Interval((low + high) / 2, low, high), margin) == expected


def test_the_files_say_what_is_missing_and_follow_from_results_json_alone(tmp_path: Path) -> None:
    folder = tmp_path / "depth" / "tiny"
    _report(folder)
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert b"out of memory" in written["report.md"]
    assert set(written) == {"results.json", "report.md", "table.csv", "depth.png"}
    for name in ("report.md", "table.csv", "depth.png"):
        (folder / name).unlink()
    rebuilt, left = rebuild(tmp_path)
    assert (rebuilt, left) == ([folder], [])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]
        self.ids |= {value for name, value in attrs if name == "id" and value}


def test_the_index_page_works_offline_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    _report(tmp_path / "depth" / "tiny")
    rebuild(tmp_path)
    page = (tmp_path / "index.html").read_text()
    links = _Links()
    links.feed(page)
    assert any(link.endswith("depth.png") for link in links.found)
    for link in links.found:
        assert not re.match(r"[a-z]+:|//", link), link
        assert link[1:] in links.ids if link.startswith("#") else (tmp_path / link).exists(), link
    for text in ("two layers against five", "shown", "not at this scale", "out of memory"):
        assert text in page
    assert "of an arm that did not run" in (tmp_path / "depth" / "tiny" / "report.md").read_text()


def test_no_reports_and_torn_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run an experiment"):
        rebuild(tmp_path)
    torn = tmp_path / "depth" / "tiny" / "results.json"
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    with pytest.raises(DataError, match=re.escape(str(torn))):
        rebuild(tmp_path)


def test_the_committed_reports_hold_every_claim_of_table_1() -> None:
    path = Path(__file__).parents[2] / "reports" / "table1" / "tiny" / "results.json"
    claims = [verdict.claim for verdict in table1_verdicts(json.loads(path.read_text())["rows"])]
    for part in ("DFlash on math", "Eagle3 on chat", "marginally", "falls along the block on code"):
        assert any(part in claim for claim in claims), part
    assert percent(Interval(0.041, 0.02, 0.063)) == "+4.1 % [+2.0, +6.3]"
