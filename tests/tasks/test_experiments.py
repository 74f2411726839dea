"""Experiments on confidence and load, from one small training run: every report is written and says what it found."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import requests
import torch
import uvicorn

from dspark_exp.calibration import Calibration, read_calibration
from dspark_exp.config import resolved_dict, validated
from dspark_exp.errors import ConfigError
from dspark_exp.reports.rebuild import rebuild
from dspark_exp.tasks import confidence, export, latency, load, profile_capacity, serve
from dspark_exp.tasks.train_eval import Job, train_eval
from dspark_exp.tasks.trained import finished_checkpoint, trained_drafter
from tests.conftest import composed
from tests.training.conftest import SMALL

pytestmark = pytest.mark.slow
OPTIONS = [
    *SMALL,
    "trainer.max_steps=30",
    "trainer.validate_every_steps=30",
    "benchmark.names=[equations,loops,thanks]",
    "benchmark.num_prompts=4",
    "benchmark.max_new_tokens=24",
    "profile.max_tokens=12",
    "profile.max_requests=4",
    "profile.repeats=2",
    "profile.context_lengths=[8,16]",
    "load.concurrency=[1,3]",
    "load.min_requests=6",
    "load.requests_per_user=1",
    "load.repeats=2",
]


def _job(folder: Path, *overrides: str) -> Job:
    config = composed(*OPTIONS, f"paths.outputs={folder}/outputs", f"paths.reports={folder}/reports",
                      f"paths.cache={folder}/cache", "tracking=none", *overrides)  # fmt: skip
    return Job(validated(config), resolved_dict(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished job."""
    folder = tmp_path_factory.mktemp("experiments")
    results = train_eval(_job(folder))
    assert results["calibration"]["num_samples"] > 0
    assert results["rows"][0]["confidence_calibrated"]["ece"]
    return folder


def test_the_calibration_lies_inside_the_checkpoint(folder: Path) -> None:
    job = _job(folder)
    path = finished_checkpoint(job.config, job.plain)
    assert path is not None
    stored = Calibration.of_dict(torch.load(path, weights_only=True)["calibration"])
    assert stored is not None
    assert stored.as_dict() == json.loads(job.results_path.read_text())["calibration"]
    assert len(stored.fitted_on) == 16


def test_an_experiment_finds_the_finished_job_and_trains_nothing(folder: Path) -> None:
    from dspark_exp.tasks.building import open_target

    job = _job(folder, "+experiment=reliability", "drafter.early_exit={min_accepted: 0.5}", "trainer.num_threads=1")
    trained = trained_drafter(job, open_target(job.config))
    assert "step 30" in trained.source
    assert trained.calibration is not None
    other = _job(folder, "seed=5")
    assert finished_checkpoint(other.config, other.plain) is None


@pytest.mark.parametrize(
    ("name", "run", "figure", "said"),
    [
        ("reliability", confidence.run_reliability, "reliability.png", "Sequential Temperature Scaling"),
        ("threshold", confidence.run_threshold, "threshold.png", "Acceptance rate from threshold 0 to 0.9"),
        ("calibration_shift", confidence.run_calibration_shift, "calibration_shift.png", "The costliest change"),
        ("load_adaptive", load.run_load_adaptive, "load_adaptive.png", "The asynchronous scheduler verifies"),
        ("latency", latency.run_latency, "latency.png", "against plain decoding"),
        ("early_exit", load.run_early_exit, "early_exit.png", "Best change at 3 users"),
        ("staleness", load.run_staleness, "staleness.png", "The most that age costs here"),
    ],
)
def test_every_experiment_writes_its_report(folder: Path, name: str, run, figure: str, said: str) -> None:
    report = run(_job(folder, f"+experiment={name}"))
    assert report == folder / "reports" / name / "tiny" / "report.md"
    assert said in report.read_text()
    assert (report.parent / figure).stat().st_size > 10_000
    results = json.loads((report.parent / "results.json").read_text())
    assert results["experiment"] == name
    assert "step 30" in results["checkpoint"]
    assert len((report.parent / "table.csv").read_text().splitlines()) > 1
    mine = folder / "renamed" / f"my_{name}" / "tiny"  # as experiment=my_... files it
    mine.mkdir(parents=True)
    (mine / "results.json").write_text(json.dumps({**results, "experiment": f"my_{name}"}))
    rebuilt, left = rebuild(folder / "renamed")
    assert mine in rebuilt
    assert not left
    assert (mine / "report.md").read_text() == report.read_text()


def test_pareto_compares_the_arms_and_the_simulator(folder: Path) -> None:
    arms = "load.arms=[plain,mtp1,fixed,threshold,prefix_scheduler,async_scheduler]"
    report = load.run_pareto(_job(folder, "+experiment=pareto", arms))
    rows = json.loads((report.parent / "results.json").read_text())["rows"]
    assert len(rows) == 6 * 2
    for row in rows:
        assert row["throughput_low"] <= row["throughput"] <= row["throughput_high"]
        assert row["requests"] == 6
        assert (row["simulated"] is None) == (row["arm"] == "mtp1")
    verified = {row["arm"]: row["verified_per_round"] for row in rows if row["concurrency"] == 3}
    assert verified["plain"] == 0
    assert verified["mtp1"] <= 1
    assert verified["fixed"] > verified["threshold"]
    assert "on the frontier" in report.read_text()
    with pytest.raises(ConfigError, match=r"load\.arms"):
        load.run_pareto(_job(folder, "+experiment=pareto", "load.arms=[medusa]"))


class _Timer:
    """In place of a ``RoundTimer``: rounds of 2 and 6 seconds by a clock that it moves itself."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.turns = clock, 0

    def turn(self) -> None:
        self.turns += 1
        self.clock[0] += 1.0

    def means(self) -> list[float]:
        return [2.0, 6.0]


def test_the_machines_drift_is_timed_in_a_share_of_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(load.time, "perf_counter", lambda: clock[0])
    timer = _Timer(clock)
    gauge = load.Gauge(timer, [1.0, 4.0])  # type: ignore[arg-type]
    for _ in range(1000):
        clock[0] += 0.1  # a slice
        gauge.work()
    assert timer.turns == pytest.approx(1 + gauge.SHARE * clock[0], abs=2)
    assert gauge.drift == pytest.approx((2.0 + 1.5) / 2)


def test_schedulers_evaluate_once_the_capacity_is_measured(folder: Path) -> None:
    path = profile_capacity.run_profile_capacity(_job(folder))
    stored = json.loads(path.read_text())
    assert stored["tokens"] == list(range(1, 13))
    assert stored["measured"]["model"] == "tiny"
    assert min(stored["seconds"][0]) > 0
    for policy in ("prefix_scheduler", "async_scheduler"):
        results = train_eval(_job(folder, f"policy={policy}"))
        assert 0 <= results["rows"][0]["verified_per_round"] <= 4
    stored["measured"]["device"] = "another"
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"device 'another'"):
        train_eval(_job(folder, "policy=async_scheduler", "seed=9"))
    path.unlink()
    with pytest.raises(ConfigError, match="task=profile_capacity"):
        train_eval(_job(folder, "policy=async_scheduler", "seed=9"))


def test_the_export_carries_the_calibration(folder: Path) -> None:
    job = _job(folder, "task=export", f"export.dir={folder}/out")
    done = export.run_export(job)
    assert (
        read_calibration(done.folder / "sts.json").as_dict() == json.loads(job.results_path.read_text())["calibration"]
    )


def test_calibration_from_recorded_shards(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(400, 4, generator=generator) < 0.8).cumprod(1).float()
    shards = folder / "shards"
    shards.mkdir()
    torch.save({"logits": torch.randn(400, 4, generator=generator), "prefix_mask": mask}, shards / "rank.0.pt")
    results = train_eval(_job(folder, f"calibration.from={shards}", "+experiment=table1", "hydra.mode=RUN"))
    assert results["calibration"]["num_samples"] == 400
    assert "served traffic" in results["calibration"]["dataset"]
    with pytest.raises(ConfigError, match=r"calibration\.prompts"):
        train_eval(_job(folder, "+calibration.prompts=3", "seed=8"))


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(serve, "build_front", lambda _: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serving.port={port} cannot be had: .*in use"):
            serve.run_serve(_job(folder, "task=serve", f"serving.port={port}"))
    with pytest.raises(ConfigError, match=r"serving\.port=70000 cannot be had"):
        serve.run_serve(_job(folder, "task=serve", "serving.port=70000"))


def test_the_server_answers_at_a_free_port_and_ends(folder: Path, monkeypatch, caplog) -> None:
    servers: list[uvicorn.Server] = []

    class Kept(uvicorn.Server):
        def __init__(self, settings: uvicorn.Config) -> None:
            super().__init__(settings)
            servers.append(self)

    monkeypatch.setattr(serve.uvicorn, "Server", Kept)
    caplog.set_level("INFO", "dspark_exp.tasks.serve")
    job = _job(folder, "task=serve", "serving.max_length=64", "serving.max_requests=2", "serving.port=0")
    thread = threading.Thread(target=serve.run_serve, args=(job,))
    thread.start()
    deadline = time.time() + 60
    while not (servers and servers[0].started) and time.time() < deadline:
        time.sleep(0.05)
    (url,) = re.findall(r"http://\S+/v1", caplog.text)
    answer = requests.post(f"{url}/completions", json={"prompt": "hello", "max_tokens": 4}, timeout=30).json()
    assert 1 <= answer["usage"]["completion_tokens"] <= 4
    servers[0].should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_the_server_is_built_from_the_finished_job(folder: Path) -> None:
    front = serve.build_front(_job(folder, "task=serve", "serving.max_length=64", "serving.max_requests=2"))
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    ticket = front.engine.submit(front.prompting.read(body, chat=True).request)
    while front.engine.step():
        pass
    assert ticket.status == "finished"
    assert 1 <= len(ticket.generation.token_ids) <= 5
