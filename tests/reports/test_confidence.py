"""A report on confidence is the same from results at hand and from the results.json that it wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dspark_exp.reports.confidence import write_reliability
from dspark_exp.reports.rebuild import rebuild

UNKNOWN = math.nan  # a position where only one outcome was seen: a drafter of a few steps has many


def _sheet(ece: float) -> dict[str, Any]:
    return {
        "ece": [ece, UNKNOWN, UNKNOWN],
        "auroc": [0.8, UNKNOWN, UNKNOWN],
        "brier": [0.1, UNKNOWN, UNKNOWN],
        "counts": [600, 40, 0],
        "bins": [[[300, 0.2, 0.25], [300, 0.7, 0.6]], [[40, 0.1, 0.0]], []],
    }


def _results() -> dict[str, Any]:
    pair = {"raw": _sheet(0.05), "calibrated": _sheet(0.02)}
    judged = {"low": 0.01, "high": 0.06, "mean_brier": 0.1}
    return {
        "experiment": "reliability",
        "task": "reliability",
        "target": "tiny",
        "drafter": "dspark_markov",
        "checkpoint": "best.ckpt, step 30",
        "calibration": {"temperatures": [1.2, 1.0, 1.0]},
        "methods": {"raw": {"mean_ece": 0.05, **judged}, "sts": {"mean_ece": 0.02, **judged}},
        "sts_against_raw": {"change": -0.03, "low": -0.04, "high": -0.02},
        "domains": {"all": pair, "math": pair},
        "rounds": {"fit": 500, "test": 640},
    }


def test_positions_with_one_outcome_have_no_figures_now_and_when_rebuilt(tmp_path: Path) -> None:
    report = write_reliability(tmp_path / "reliability" / "tiny", _results())
    text = report.read_text()
    assert "nan" not in text.lower()
    assert "lowers the mean ECE: 5.00 % raw, 2.00 % calibrated" in text
    stored = json.loads((report.parent / "results.json").read_text())
    assert stored["domains"]["all"]["raw"]["ece"] == [0.05, None, None]
    rebuilt, left = rebuild(tmp_path)
    assert rebuilt == [report.parent]
    assert not left
    assert report.read_text() == text


def test_the_reach_of_the_head_stands_beside_what_it_reached(tmp_path: Path) -> None:
    results = _results()
    bare = write_reliability(tmp_path / "bare", results).read_text()
    assert "analytic" not in bare
    for sheets in results["domains"].values():
        sheets["raw"]["auroc"] = [0.66, UNKNOWN, UNKNOWN]
        sheets["analytic"] = _sheet(0.01) | {"auroc": [0.72, UNKNOWN, UNKNOWN]}
    text = write_reliability(tmp_path / "reliability" / "tiny", results).read_text()
    assert "| 1 | 600 | 1.20 | 5.0 % | 2.0 % | 0.66 | 0.72 |" in text
    assert "not above 0.75 at position 1." in text
    assert "reach 0.72 there" in text
    rebuild(tmp_path)
    assert (tmp_path / "reliability" / "tiny" / "report.md").read_text() == text
