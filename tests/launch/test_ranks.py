"""Jobs on several ranks: equal to one process, two jobs are two runs, a killed rank ends its job, resume is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from dspark_exp.errors import ConfigError, LaunchError
from dspark_exp.launch import gathered, multi_node_commands, num_ranks, rank, run_on_ranks, share
from dspark_exp.training import DrafterData
from tests.training.conftest import SMALL

ROOT = Path(__file__).parents[2]
CHECKS = (
    "gradients_equal_one_process_on_the_joined_batch",
    "a_rank_with_nothing_live_neither_hangs_nor_changes_the_others",
    "results_come_back_in_the_order_of_the_items",
    "sharded_decoding_equals_one_process",
    "a_sharded_target_equals_a_whole_one",
    "a_target_cut_across_ranks_equals_a_whole_one",
    "a_cut_that_does_not_divide_is_refused",
    "preparation_is_shared",
    "regeneration_is_shared",
)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "COLUMNS": "200"}


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**_environment(), "RANK_CHECKS_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    run_on_ranks("tests.launch.rank_checks", CHECKS, 2, tmp_path)


def test_a_failing_rank_is_reported_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="no_such_check"):
        run_on_ranks("tests.launch.rank_checks", ["no_such_check"], 2, tmp_path)


def test_a_cluster_that_sets_ranks_for_everyone_does_not_split_a_single_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert (rank(), num_ranks()) == (0, 1)
    assert share([1, 2, 3]) == gathered([1, 2, 3]) == [1, 2, 3]


def test_commands_for_several_nodes_name_module_ranks_and_config() -> None:
    commands = multi_node_commands("some.module", ["/job/config.json"], 8, 4)
    for command in commands.values():
        assert "--nnodes=4 --nproc-per-node=8" in command
        assert command.endswith("-m some.module /job/config.json")
    assert any("srun --nodes=4 --ntasks-per-node=1" in command for command in commands.values())


def _command(*arguments: str) -> list[str]:
    flags = [text for text in arguments if text.startswith("-")]
    overrides = ["trainer.devices=2", "trainer.batch_size=2", *(text for text in arguments if text not in flags)]
    return [sys.executable, "-m", "dspark_exp", *flags, *SMALL, *overrides]


@pytest.mark.slow
def test_a_multirun_on_two_ranks_is_exactly_two_runs(tmp_path: Path) -> None:
    command = _command("-m", "seed=1,2", "tracking=mlflow", "trainer.max_steps=4")
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folders = list((tmp_path / "outputs" / "single" / "tiny").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "results.json").read_text())["provenance"]["ranks"] == 2
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("dspark_exp")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.data.tags.get("kind") == "sweep"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert (len(parents), len(children), len(runs)) == (1, 2, 3)
    assert len({run.data.params["seed"] for run in children}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "features", "sharded"),
    [
        ("dspark_rnn", ("features=online",), ("trainer.strategy=fsdp", "target.shard=fsdp")),
        (
            "eagle3",
            ("features=bounded", "features.max_gb=0.0005"),
            ("trainer.strategy=fsdp", "target.shard=tensor_parallel"),
        ),
    ],
)
def test_a_sharded_drafter_and_a_sharded_target_train_and_decode_as_whole_ones(
    drafter: str, features: tuple[str, ...], sharded: tuple[str, ...], tmp_path: Path
) -> None:
    """The same steps to rounding, and the same answers; checkpoints are whole ones.

    A bounded cache that holds some rows alone lets ranks need another number of target passes.
    """
    steps = ("trainer.max_steps=6", "trainer.validate_every_steps=3", f"drafter={drafter}", *features)
    found = {}
    for outputs, options in (("whole", ()), ("parts", sharded)):
        done = subprocess.run(
            _command(*steps, f"paths.outputs={outputs}", *options),
            cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        state = torch.load(next(tmp_path.glob(f"{outputs}/**/last.ckpt")), weights_only=True)["state_dict"]
        found[outputs] = state, json.loads(next(tmp_path.glob(f"{outputs}/**/results.json")).read_text())
    assert found["parts"][0].keys() == found["whole"][0].keys()
    for name, tensor in found["whole"][0].items():
        torch.testing.assert_close(
            found["parts"][0][name], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )
    curves = [results["training"]["learning_curve"] for _, results in found.values()]
    for whole, parts in zip(*curves, strict=True):
        assert parts["tau"] == pytest.approx(whole["tau"], rel=0.05)
    taus = [[row["tau"] for row in results["rows"]] for _, results in found.values()]
    assert taus[0] == pytest.approx(taus[1], rel=0.05)


@pytest.mark.slow
def test_jobs_that_train_together_on_two_ranks_give_what_they_give_alone(tmp_path: Path) -> None:
    sweep = ("-m", "features=online", "trainer.max_steps=4", "drafter=dspark_rnn,eagle3")
    found = {}
    for outputs, shared in (("alone", "false"), ("together", "true")):
        done = subprocess.run(
            _command(*sweep, f"paths.outputs={outputs}", f"sweep.shared_target={shared}"),
            cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("The target ran for 4 of the 8 batches" in done.stdout + done.stderr) == (outputs == "together")
        paths = sorted(tmp_path.glob(f"{outputs}/**/last.ckpt"))
        found[outputs] = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    for alone, together in zip(*found.values(), strict=True):
        assert alone.keys() == together.keys()
        assert all(torch.equal(alone[name], together[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_job_and_the_same_command_goes_on_exactly(strategy: str, tmp_path: Path) -> None:
    steps = ("trainer.max_steps=60", "trainer.validate_every_steps=10", "drafter=dspark_rnn")
    steps += (f"trainer.strategy={strategy}",)
    broken = subprocess.Popen(
        _command(*steps, "paths.outputs=broken", "paths.cache=cache"),
        cwd=tmp_path, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("broken/**/last.ckpt")):
        assert broken.poll() is None, broken.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (killed,) = [p for p in psutil.Process(broken.pid).children(recursive=True) if _rank_of(p) == "1"]
    started = time.monotonic()
    killed.send_signal(signal.SIGKILL)
    output, _ = broken.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert broken.returncode == 2, output[-3000:]
    assert "was killed or crashed" in output
    assert not list(tmp_path.glob("broken/single/**/results.json"))
    for outputs in ("broken", "whole"):
        done = subprocess.run(
            _command(*steps, f"paths.outputs={outputs}", "paths.cache=cache"),
            cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    states = [torch.load(next(tmp_path.glob(f"{o}/**/last.ckpt")), weights_only=True) for o in ("broken", "whole")]
    assert states[0]["global_step"] == states[1]["global_step"] == 60
    for name, tensor in states[1]["state_dict"].items():
        assert torch.equal(tensor, states[0]["state_dict"][name]), name


def _rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK") if "dspark_exp.tasks.ranks" in process.cmdline() else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def test_going_on_with_another_number_of_ranks_is_refused() -> None:
    data = DrafterData([], [], 1, 1, 0, 0)  # type: ignore[arg-type]
    state = data.state_dict()
    with pytest.raises(ConfigError, match=r"begun on 2 rank\(s\)"):
        data.load_state_dict({**state, "num_ranks": 2})
