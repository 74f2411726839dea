"""Commands as a user types them: help, mistakes in one sentence, sweeps that survive, the wheel in another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.training.conftest import SMALL

ROOT = Path(__file__).parents[2]
FAST = [*SMALL, "trainer.max_steps=4", "trainer.validate_every_steps=4"]


def _run(*arguments: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "dspark_exp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_help_is_a_page_a_newcomer_can_use(tmp_path: Path) -> None:
    done = _run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for expected in ("+experiment=table1", "dspark_markov", "smollm2_135m", "trainer.max_steps", "Errors are one"):
        assert expected in done.stdout
    assert len(done.stdout.splitlines()) < 60


MISTAKES = {
    "block size of zero": (["drafter.network.block_size=0"], "block_size=0"),
    "no layers": (["drafter.network.num_layers=0"], "num_layers=0"),
    "feature layer out of range": (["target.layer_ids=[0,5]"], "from -1 (embeddings) to 4"),
    "unknown benchmark": (["benchmark.names=[gsm9k]"], "gsm9k"),
    "missing model": (["target.path=/nowhere/model"], "/nowhere/model"),
    "missing data": (["data=jsonl", "data.path=/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
    "missing benchmark files": (["benchmark=table1", "benchmark.dir=/nowhere"], "gsm8k"),
    "no data path": (["data=jsonl"], "data.path"),
    "misspelt group": (["+experimnt=table1"], "experimnt"),
    "unknown network option": (["+drafter.network.blok_size=3"], "blok_size"),
    "wrong type": (["trainer.max_steps=many"], "trainer.max_steps"),
    "negative objective": (["drafter.objective.l1=-1"], "l1=-1"),
    "unknown task": (["task=fly"], "train_eval"),
    "zero learning rate": (["trainer.lr=0"], "lr=0"),
    "threshold without confidence": (
        ["drafter=dflash", "policy=threshold"],
        "confidence head",
    ),
    "features beyond the disk budget": (["features.max_gb=0.00001"], "features.max_gb"),
    "unknown feature dtype": (["features.dtype=int3"], "int3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_ends_in_one_clear_sentence_before_any_training(tmp_path: Path, name: str) -> None:
    arguments, expected = MISTAKES[name]
    done = _run(*FAST, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.ckpt"))


def test_an_unknown_choice_of_a_group_lists_the_choices(tmp_path: Path) -> None:
    done = _run("drafter=medusa", cwd=tmp_path)
    assert done.returncode != 0
    assert "dspark_markov" in done.stderr


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    done = _run(*FAST, "data=jsonl", "data.path=rows.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no conversation: it is empty" in done.stderr


@pytest.mark.slow
def test_table1_reports_survives_a_failing_job_and_repeats_only_what_is_missing(tmp_path: Path) -> None:
    sweep = [
        "+experiment=table1", "drafter=dflash,dspark_markov", *FAST, "tracking=mlflow", "data.num_per_benchmark=2",
    ]  # fmt: skip
    # the Markov head's rank is impossible: that job fails, the other one is kept
    broken = _run(*sweep, "target.draft.head_rank=0", cwd=tmp_path)
    assert broken.returncode == 1, broken.stderr
    assert "head_rank=0" in broken.stderr
    report = tmp_path / "reports" / "table1" / "tiny"
    results = json.loads((report / "results.json").read_text())
    assert {row["drafter"] for row in results["rows"]} == {"dflash"}
    assert "head_rank=0" in results["missing"][0]["reason"]
    assert "missing" in (report / "report.md").read_text()

    whole = _run(*sweep, "target.draft.head_rank=8", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    written = {p: p.stat().st_mtime for p in tmp_path.rglob("outputs/table1/tiny/*/results.json")}
    again = _run(*sweep, "target.draft.head_rank=8", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished already") == 2
    assert {p: p.stat().st_mtime for p in tmp_path.rglob("outputs/table1/tiny/*/results.json")} == written
    results = json.loads((report / "results.json").read_text())
    assert results["experiment"] == "table1"
    assert results["target"] == "tiny"
    assert results["missing"] == []
    assert {row["drafter"] for row in results["rows"]} == {"dflash", "dspark_markov"}
    for name in ("report.md", "position.png", "learning.png", "table.csv", "positions.csv"):
        assert (report / name).stat().st_size > 200
    _check_mlflow(tmp_path, results)


@pytest.mark.slow
def test_a_sweep_in_parallel_jobs_reports_with_verdicts_and_repeats_no_finished_job(tmp_path: Path) -> None:
    few = [argument for argument in FAST if not argument.startswith("drafter.network.block_size")]
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "trainer.num_threads=1", "tracking=mlflow"]
    sweep = ["+sweeps=block_size", "drafter=dflash,dspark_markov", "drafter.network.block_size=4", *few, *parallel]
    planned = _run(*sweep, "seed=0,1", "sweep.plan=true", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "4 jobs to do" in planned.stdout
    assert not list(tmp_path.rglob("*.ckpt"))

    half = _run(*sweep, "seed=0", cwd=tmp_path)  # as if the sweep had been stopped half way
    assert half.returncode == 0, half.stderr
    assert len(list(tmp_path.glob("outputs/block_size/tiny/*/results.json"))) == 2
    whole = _run(*sweep, "seed=0,1", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("finished already") == 2
    assert "job 4 of 4" in whole.stdout
    results = json.loads((tmp_path / "reports" / "block_size" / "tiny" / "results.json").read_text())
    assert len(results["jobs"]) == 4
    assert {job["options"]["seed"] for job in results["jobs"]} == {0, 1}

    # another experiment with the same options takes the finished jobs
    options = ["drafter=dflash", "drafter.network.block_size=4", "calibration.num_prompts=0", "trainer.num_threads=1"]
    single = _run(*few, *options, cwd=tmp_path)
    assert single.returncode == 0, single.stderr
    assert "in another experiment" in single.stdout

    rebuilt = _run("task=report", cwd=tmp_path)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert "block_size on tiny" in (tmp_path / "reports" / "index.html").read_text()


@pytest.mark.slow
def test_a_sweep_trains_its_jobs_together_from_one_target(tmp_path: Path) -> None:
    sweep = ["+sweeps=seeds", "seed=0,1", "drafter=dflash,dspark_markov", "sweep.shared_target=true", *FAST]
    stored = _run(*sweep, cwd=tmp_path)
    assert stored.returncode == 1
    assert "Choose features=online" in stored.stderr
    done = _run(*sweep, "features=online", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The target ran for 4 of the 8 batches") == 2
    assert "job 4 of 4" in done.stdout
    assert len(json.loads((tmp_path / "reports" / "seeds" / "tiny" / "results.json").read_text())["jobs"]) == 4


@pytest.mark.slow
def test_a_search_goes_on_where_it_ended(tmp_path: Path) -> None:
    first = _run("+sweeps=tune", *FAST, "hydra.sweeper.n_trials=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = _run("+sweeps=tune", *FAST, "hydra.sweeper.n_trials=2", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert more.stdout.count("finished already") == 1
    assert "Best value" in more.stdout
    curves = [
        json.loads(path.read_text())["training"]["learning_curve"]
        for path in tmp_path.glob("outputs/tune/tiny/*/results.json")
    ]
    best = max(point["tau"] for curve in curves for point in curve)
    assert f"Best value: {best}" in more.stdout


@pytest.mark.slow
def test_a_search_ends_hopeless_trials_early(tmp_path: Path) -> None:
    """With one finished trial to compare with, a trial below it at the same step is ended there, once."""
    steps = ["trainer.max_steps=8", "trainer.validate_every_steps=2", "hydra.sweeper.n_trials=5"]
    search = ["+sweeps=tune", *FAST, *steps, "sweep.prune_after=1"]
    first = _run(*search, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "reports" / "tune" / "tiny" / "results.json").read_text())
    ended = [one for one in report["trials"] if one["pruned"]]
    assert len(report["trials"]) == 5
    assert ended
    assert all(one["tau"] is None and one["steps"] <= 8 for one in ended)
    folders = list(tmp_path.glob("outputs/tune/tiny/*"))
    assert sum((folder / "pruned.json").exists() for folder in folders) == len(ended)
    assert sum((folder / "results.json").exists() for folder in folders) == 5 - len(ended)

    again = _run(*search, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "of 8: val/tau" not in again.stdout  # nothing was trained
    assert (
        json.loads((tmp_path / "reports" / "tune" / "tiny" / "results.json").read_text())["trials"] == report["trials"]
    )

    single = _run(*FAST, "sweep.prune_after=1", cwd=tmp_path)
    assert single.returncode == 2
    assert "ends trials of a search early (+sweeps=tune)" in single.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["submitit_local", "ray"])
def test_jobs_of_a_sweep_run_in_a_launchers_processes(launcher: str, tmp_path: Path) -> None:
    if launcher == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed here; run `make ray`")
    done = _run(
        "+sweeps=seeds", "name=mine", f"hydra/launcher={launcher}", "seed=0", "drafter=dflash,dspark_markov", *FAST,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "reports" / "mine" / "tiny" / "results.json").read_text())
    assert {job["options"]["drafter.name"] for job in results["jobs"]} == {"dflash", "dspark_markov"}
    assert results["missing"] == []


def _check_mlflow(folder: Path, results: dict) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("dspark_exp")
    runs = client.search_runs([experiment.experiment_id])
    job = next(run for run in runs if run.data.tags.get("drafter") == "dspark_markov" and "tau/all" in run.data.metrics)
    for name in ("tau/equations", "acceptance/pos_1", "train/ce"):
        assert name in job.data.metrics, name
    assert {one.dataset.name for one in job.inputs.dataset_inputs} == {"conversations", "equations", "thanks"}
    parents = [run for run in runs if run.data.tags.get("kind") == "sweep"]
    last = max(parents, key=lambda run: run.info.start_time)
    assert last.info.status == "FINISHED"
    assert "report" in [f.path for f in client.list_artifacts(last.info.run_id)]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    tau = {run.data.tags["drafter"]: run.data.metrics.get("tau/equations") for run in children}
    for row in results["rows"]:
        if row["benchmark"] == "equations":
            assert tau[row["drafter"]] == pytest.approx(row["tau"])
    assert any("trainer.max_steps" in run.data.params for run in children)


@pytest.mark.slow
def test_the_wheel_finds_its_configs_from_another_folder(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.stat().st_size < 5_000_000
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import dspark_exp.__main__ as m; "
        f"assert m.__file__.startswith({str(site)!r}), m.__file__; sys.exit(m.main())"
    )
    done = _run("--cfg", "job", cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert "dspark_markov" in done.stdout
    done = _run("+sweeps=depth", "--cfg", "job", cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert "How many layers" in done.stdout
    done = _run(*FAST, cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    assert "Accepted length" in done.stdout


@pytest.mark.slow
def test_folders_with_an_equals_sign_and_a_comma_train_and_resume(tmp_path: Path) -> None:
    arguments = [*FAST, "paths.outputs='run=1,lr=a'", "trainer.max_steps=4"]
    first = _run(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (results,) = tmp_path.rglob("single/tiny/*/results.json")
    results.unlink()  # as if killed after training: the same command goes on from its last checkpoint
    again = _run(*arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert results.exists()
    assert results.is_relative_to(tmp_path / "run=1,lr=a")


@pytest.mark.slow
def test_data_is_inspected_and_a_run_estimated_before_any_work(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "of course"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    data = ["data=jsonl", "data.path=rows.jsonl", "data.num_validation=2"]
    for task, expected in (("inspect_data", "supervised tokens"), ("estimate", "this machine")):
        done = _run(*FAST, *data, f"task={task}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert not list(tmp_path.rglob("*.ckpt"))
