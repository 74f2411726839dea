"""What the jobs of a sweep would take together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_exp.config import resolved_dict, validated
from dspark_exp.tasks.plan import planned, print_plan, totals
from dspark_exp.tasks.train_eval import Job
from tests.conftest import composed
from tests.training.conftest import SMALL


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _planned(*overrides: str) -> dict[str, Any]:
    config = composed(*SMALL, *overrides)
    return planned(Job(validated(config), resolved_dict(config)))


def test_features_that_jobs_share_are_counted_once() -> None:
    stored = [_planned("features=stored", f"seed={seed}") for seed in range(3)]
    together = totals(stored)
    for name in ("disk_gb", "hours"):
        assert stored[0]["features"][name] > 0
        own = sum(plan[name] for plan in stored)
        assert together[name] == pytest.approx(own + stored[0]["features"][name], rel=0.2 if name == "hours" else 1e-9)
        assert together[name] < sum(totals([plan])[name] for plan in stored)


def test_jobs_with_other_features_share_none() -> None:
    first, second = _planned("features=stored"), _planned("features=stored", "data.max_length=64")
    assert totals([first, second])["disk_gb"] == pytest.approx(
        sum(totals([plan])["disk_gb"] for plan in (first, second))
    )


def test_online_jobs_share_the_target_only_where_they_train_together() -> None:
    online, together = _planned("features=online"), _planned("features=online", "sweep.shared_target=true")
    assert online["features"] == {"disk_gb": 0.0, "hours": 0.0}
    assert together["features"]["hours"] > 0
    assert together["shares"] == _planned("features=online", "sweep.shared_target=true", "drafter=dflash")["shares"]
    assert together["shares"] != _planned("features=online", "sweep.shared_target=true", "seed=5")["shares"]


def test_the_plan_names_what_is_shared_and_leaves_out_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [{"job": f"seed={seed}", "plan": _planned("features=stored", f"seed={seed}")} for seed in range(3)]
    jobs[0]["plan"]["is_done"] = True
    print_plan(jobs)
    printed = capsys.readouterr().out
    assert "target features of 2 jobs" in printed
    assert "2 jobs to do" in printed
