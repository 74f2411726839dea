"""Jobs that train together from one target give what they give alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_exp.errors import ConfigError, LaunchError
from dspark_exp.targets import Target
from dspark_exp.tasks import together
from dspark_exp.tasks.together import train_together, train_with_siblings
from dspark_exp.tasks.train_eval import Job, train_eval

MakeJob = Callable[..., Job]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every batch whose features the target computes."""
    found, features = [], Target.features

    def count(self: Target, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        found.append(len(ids))
        return features(self, ids, mask)

    monkeypatch.setattr(Target, "features", count)
    return found


def _outcome(job: Job) -> tuple[Any, Any, Any]:
    results = json.loads(job.results_path.read_text())
    rows = [{key: row[key] for key in ("benchmark", "tau", "rounds")} for row in results["rows"]]
    weights = torch.load(job.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return results["training"]["learning_curve"], rows, weights


def test_arms_give_what_they_give_alone_and_share_the_targets_passes(
    make_job: MakeJob, tmp_path: Path, passes: list[int]
) -> None:
    arms = ("drafter=dflash",), ("drafter=dspark_markov", "trainer.lr=1e-3"), ("drafter=eagle3", "trainer.max_steps=8")
    apart = [make_job("features=online", *arm, outputs=tmp_path / "apart") for arm in arms]
    for job in apart:
        train_eval(job)
    assert passes.count(4) == 12 + 12 + 8
    passes.clear()
    together = [make_job("features=online", *arm, outputs=tmp_path / "together") for arm in arms]
    train_together(together)
    assert passes.count(4) == 12
    for one, other in zip(apart, together, strict=True):
        (curve, rows, weights), (same_curve, same_rows, same_weights) = _outcome(one), _outcome(other)
        assert curve == same_curve
        assert rows == same_rows
        assert weights.keys() == same_weights.keys()
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_a_failing_arm_takes_no_other_with_it(
    make_job: MakeJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [make_job("features=online", "drafter=dflash", f"trainer.lr={lr}") for lr in (0.001, 0, 0.002)]
    with caplog.at_level("INFO"):
        train_together(jobs)
    assert [job.results_path.exists() for job in jobs] == [True, False, True]
    assert "failed in company (trainer needs lr > 0" in caplog.text
    assert "The target ran for 12 of the 24 batches" in caplog.text


def test_only_jobs_with_the_same_target_and_data_join(make_job: MakeJob, tmp_path: Path) -> None:
    several = [
        make_job("features=online", "drafter=dflash", *options)
        for options in ((), ("trainer.lr=1e-3",), ("seed=1",), ("trainer.batch_size=3",), ("data.max_rows=20",))
    ]
    path = tmp_path / "jobs"
    path.write_text(json.dumps([job.plain for job in several]))
    train_with_siblings(several[0], path)
    assert [job.results_path.exists() for job in several] == [True, True, False, False, False]
    train_with_siblings(several[2], path)  # alone: left to the usual way
    assert not several[2].results_path.exists()


def test_where_nothing_can_be_shared_the_message_says_what_to_choose(make_job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    with pytest.raises(ConfigError, match="not a search"):
        train_with_siblings(make_job("features=online"), path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="features=online or features=bounded"):
        train_with_siblings(make_job("features=stored"), path)
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=1"):
        train_with_siblings(make_job("features=online", "trainer.num_nodes=2", "trainer.accelerator=cpu"), path)


def test_several_ranks_go_on_alike_or_not_at_all(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone would wait for the others for ever."""
    monkeypatch.setattr(together, "num_ranks", lambda: 2)

    def fail_second(job: Job, company: together.Company) -> None:
        for batch in range(50):
            if job is jobs[1] and batch == 3:
                raise OSError("this rank's disk")
            begun.append(batch)
            company.turn._turns.take(company.turn._arm, batch)

    begun: list[int] = []
    jobs = [make_job("features=online", f"trainer.lr={lr}") for lr in (1e-3, 2e-3, 3e-3)]
    monkeypatch.setattr(together, "train_eval", fail_second)
    with pytest.raises(OSError, match="this rank's disk"):
        train_together(jobs)
    assert max(begun) <= 5


def test_company_that_failed_on_its_ranks_is_not_tried_again(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handed: list[str] = []

    def fail(module: str, arguments: list[str], processes: int, logs: Path) -> None:
        handed.extend(arguments)
        raise LaunchError(f"one of {processes} was killed")

    monkeypatch.setattr(together, "run_on_ranks", fail)
    options = ("features=online", "trainer.devices=2", "trainer.accelerator=cpu")
    jobs = [make_job(*options, f"trainer.lr={lr}") for lr in (1e-3, 2e-3)]
    path = tmp_path / "jobs"
    path.write_text(json.dumps([job.plain for job in jobs]))
    for job in jobs:
        train_with_siblings(job, path)
    assert len(handed) == 1
    assert json.loads(Path(handed[0]).read_text()) == [job.plain for job in jobs]
    assert caplog.text.count("one of 2 was killed") == 1
