"""Jobs reach an MLflow store while they run, or later; a store that is away ends nothing."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from dspark_exp.errors import Pruned
from dspark_exp.tracking import FinishedJob, History, JobTracker, TrackedData, read_curves

TAGS = {"drafter": "dflash", "target": "tiny", "experiment": "depth"}
METRICS = {"tau/all": 2.5, "acceptance/pos_1": 0.7}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), _free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--artifacts-destination", str(folder / "kept")]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urlopen(f"{url}/health", timeout=1).read()
                break
            except (URLError, OSError):
                time.sleep(0.25)
        else:
            pytest.fail("the tracking server did not start")
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)


def _tracker(uri: str, folder: Path) -> JobTracker:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return JobTracker(uri, "drafts", folder.name, folder, {"trainer.lr": 0.1}, TAGS)


def _train(tracker: JobTracker, steps: range) -> None:
    for step in steps:
        for logger in tracker.loggers:
            logger.log_metrics({"train/loss": 1.0 / step}, step)
    for logger in tracker.loggers:
        logger.save()


def _finished(folder: Path) -> FinishedJob:
    (folder / "results.json").write_text(json.dumps({"tau": 2.5}))
    data = [TrackedData("gsm8k", "12ab", "evaluation", {"rows": 3})]
    return FinishedJob(folder, {"trainer.lr": 0.1}, TAGS, METRICS, [folder / "results.json"], data)


def _stores(server: str, tmp_path: Path) -> dict[str, str]:
    return {"file": f"sqlite:///{tmp_path}/runs.db", "server": server}


@pytest.mark.parametrize("store", ["file", "server"])
def test_a_run_that_was_tracked_equals_one_that_is_logged_later(store: str, server: str, tmp_path: Path) -> None:
    uri = _stores(server, tmp_path)[store]
    tracked, later = tmp_path / f"dflash-{store}1", tmp_path / f"dflash-{store}2"
    with _tracker(uri, tracked) as tracker:
        _train(tracker, range(1, 6))
        job = _finished(tracked)
        tracker.log_results(job.metrics, job.files, job.data)
    with _tracker("", later) as tracker:
        _train(tracker, range(1, 6))
    history = History(uri, "drafts")
    assert not history.log(job)
    assert history.log(_finished(later))
    assert not history.log(_finished(later))

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("drafts")
    runs = {
        run.info.run_name: run
        for run in client.search_runs([experiment.experiment_id])
        if run.info.run_name in (tracked.name, later.name)
    }
    first, second = runs[tracked.name], runs[later.name]
    assert first.info.status == second.info.status == "FINISHED"
    assert first.data.metrics == second.data.metrics
    assert first.data.metrics["train/loss"] == pytest.approx(0.2)
    assert first.data.params == second.data.params == {"trainer.lr": "0.1"}
    for run in (first, second):
        curve = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(point.step, point.value) for point in curve] == [(s, pytest.approx(1 / s)) for s in range(1, 6)]
        assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["results.json"]
        assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["gsm8k"]
        assert {name: run.data.tags[name] for name in TAGS} == TAGS
    parent = client.get_run(second.data.tags["mlflow.parentRunId"])
    assert parent.info.run_name == "depth/tiny"


def test_a_store_that_is_away_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = tmp_path / "dflash-1"
    with caplog.at_level(logging.WARNING), _tracker(f"http://127.0.0.1:{_free_port()}", folder) as tracker:
        _train(tracker, range(1, 4))
        job = _finished(folder)
        tracker.log_results(job.metrics, job.files, job.data)
    assert caplog.text.count("task=track") == 1
    assert read_curves(folder / "curves") == {("train/loss", s): pytest.approx(1 / s) for s in range(1, 4)}
    assert History(f"sqlite:///{tmp_path}/runs.db", "drafts").log(job)


def test_a_store_that_goes_away_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri, folder = f"sqlite:///{tmp_path}/store/runs.db", tmp_path / "dflash-1"
    with caplog.at_level(logging.WARNING), _tracker(uri, folder) as tracker:
        _train(tracker, range(1, 3))
        for path in (tmp_path / "store").glob("runs.db*"):
            path.write_bytes(b"not a database")
        _train(tracker, range(3, 6))
    assert caplog.text.count("task=track") == 1
    assert len(read_curves(folder / "curves")) == 5


def test_a_resumed_job_goes_on_in_its_run_and_its_curves_join(tmp_path: Path) -> None:
    uri, folder = f"sqlite:///{tmp_path}/runs.db", tmp_path / "dflash-1"
    for steps in (range(1, 4), range(3, 6)):
        with _tracker(uri, folder) as tracker:
            _train(tracker, steps)
    (run,) = MlflowClient(uri).search_runs([MlflowClient(uri).get_experiment_by_name("drafts").experiment_id])
    assert run.data.metrics["train/loss"] == pytest.approx(0.2)
    assert [step for _, step in sorted(read_curves(folder / "curves"))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("error", "status"), [(Pruned([{"step": 2.0, "tau": 1.5}]), "KILLED"), (OSError(), "FAILED")])
def test_a_trial_that_was_ended_early_is_told_from_one_that_failed(
    error: Exception, status: str, tmp_path: Path
) -> None:
    uri, folder = f"sqlite:///{tmp_path}/runs.db", tmp_path / "dflash-1"

    def train() -> None:
        with _tracker(uri, folder) as tracker:
            _train(tracker, range(1, 3))
            raise error

    with pytest.raises(type(error)):
        train()
    (run,) = MlflowClient(uri).search_runs([MlflowClient(uri).get_experiment_by_name("drafts").experiment_id])
    assert run.info.status == status


def test_another_store_gets_a_run_of_its_own(tmp_path: Path) -> None:
    folder, uris = tmp_path / "dflash-1", [f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")]
    for uri in uris:
        with _tracker(uri, folder) as tracker:
            _train(tracker, range(1, 3))
    for uri in uris:
        client = MlflowClient(uri)
        assert len(client.search_runs([client.get_experiment_by_name("drafts").experiment_id])) == 1


@pytest.mark.parametrize("store", ["file", "server"])
def test_an_export_becomes_versions_of_a_registered_model(store: str, server: str, tmp_path: Path) -> None:
    uri, folder = _stores(server, tmp_path)[store], tmp_path / f"dflash-{store}"
    export = tmp_path / "export-deepspec"
    export.mkdir()
    (export / "config.json").write_text("{}")
    assert History(f"sqlite:///{tmp_path}/none.db", "drafts").register("unknown", export, "drafter") is None
    with _tracker(uri, folder):
        pass
    history = History(uri, "drafts")
    assert [history.register(folder.name, export, "drafter") for _ in range(2)] == ["1", "2"]
    version = MlflowClient(uri).get_model_version("drafter", "2")
    assert version.run_id == (folder / "mlflow_run_id").read_text()
    assert version.source.endswith("export-deepspec")
    later = tmp_path / f"dflash-{store}-untracked"
    with _tracker("", later):
        pass
    assert history.register(later.name, export, "drafter") is None
    assert history.log(_finished(later))
    assert history.register(later.name, export, "drafter") == "3"
