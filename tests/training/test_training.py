"""Training: resumed = unbroken, stored = online, checkpoints are plain, a step learns, results carry the sheet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from dspark_exp.errors import CheckpointError, ConfigError
from dspark_exp.tasks import train_eval as recipe
from dspark_exp.tasks.building import build_drafter, open_target
from dspark_exp.tasks.checkpoints import load_drafter
from dspark_exp.tasks.prepare_data import compute_of, prepare_data
from dspark_exp.tasks.train_eval import Job, train_eval
from dspark_exp.training import Optimization, as_features, callbacks, collate

MakeJob = Callable[..., Job]
DRAFTERS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3")


class _Killed(Exception):
    pass


class _KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise _Killed


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["dspark_rnn", "eagle3"])
def test_a_killed_run_resumes_bit_for_bit(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    whole = make_job(f"drafter={drafter}", outputs=tmp_path / "whole")
    train_eval(whole)
    broken = make_job(f"drafter={drafter}", outputs=tmp_path / "broken")
    bars = recipe.RichProgressBar
    monkeypatch.setattr(recipe, "RichProgressBar", lambda: _KillAt(10))
    with pytest.raises(_Killed):
        train_eval(broken)
    assert not broken.results_path.exists()
    monkeypatch.setattr(recipe, "RichProgressBar", bars)
    train_eval(broken)
    states = [torch.load(job.folder / "checkpoints" / "last.ckpt", weights_only=True) for job in (whole, broken)]
    assert states[0]["global_step"] == states[1]["global_step"] == 12
    for name, tensor in states[0]["state_dict"].items():
        assert torch.equal(tensor, states[1]["state_dict"][name]), name
    moments = [state["optimizer_states"][0]["state"] for state in states]
    for index, entry in moments[0].items():
        assert torch.equal(entry["exp_avg_sq"], moments[1][index]["exp_avg_sq"])
    results = [json.loads(job.results_path.read_text()) for job in (whole, broken)]
    assert results[0]["training"]["learning_curve"] == results[1]["training"]["learning_curve"]
    assert [row["tau"] for row in results[0]["rows"]] == [row["tau"] for row in results[1]["rows"]]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stored_online_and_bounded_features_give_the_same_loss(make_job: MakeJob, drafter: str) -> None:
    losses = []
    for mode in ("stored", "online", "bounded"):
        job = make_job(f"drafter={drafter}", f"features={mode}")
        target = open_target(job.config)
        module = recipe._module(job.config, target, build_drafter(job.config, target), compute_of(job.config, target))
        module._sum_over_ranks = lambda value: value
        rows = prepare_data(job.config, target).rows
        batch = collate([rows[i] for i in (5, 0, 11, 7)], target.facts.pad_token_id)
        if mode != "stored":
            assert "taps" not in batch
            batch["taps"], batch["final"] = module._compute_features(batch["input_ids"], batch["attention_mask"])
        losses.append(module.objective_of(as_features(batch), step=3).loss.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["dspark_markov", "dflash"])
def test_a_job_writes_the_whole_metric_sheet(make_job: MakeJob, drafter: str) -> None:
    job = make_job(f"drafter={drafter}")
    results = train_eval(job)
    assert json.loads(job.results_path.read_text()) == json.loads(json.dumps(results))
    assert {row["benchmark"] for row in results["rows"]} == {"equations", "thanks"}
    for row in results["rows"]:
        assert row["tau"] == pytest.approx(row["emitted_tokens"] / row["rounds"])
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert sum(row["emitted_by_prompt"]) == row["emitted_tokens"]
        assert len(row["conditional_acceptance"]) == len(row["position_counts"]) == 4
        assert ("confidence" in row) == (drafter == "dspark_markov")
        assert row["verify_rate"] == pytest.approx(row["tau"] / (row["verified_per_round"] + 1))
    assert 0 < results["training"]["data_wait_share"] < 1
    provenance = results["provenance"]
    assert provenance["stop_ids"]
    assert provenance["evaluation"]["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert set(provenance["evaluation"]["prompts_sha256"]) == {"equations", "thanks"}
    rounds = json.loads((job.folder / "rounds.json").read_text())
    assert sum(len(prompt) for prompt in rounds["thanks"]) == results["rows"][1]["rounds"]
    again = train_eval(job)
    assert again["seconds"] == results["seconds"]  # read back, not repeated


def test_training_lowers_the_loss_of_every_drafter(make_job: MakeJob) -> None:
    for drafter in DRAFTERS:
        job = make_job(f"drafter={drafter}")
        target = open_target(job.config)
        network = build_drafter(job.config, target)
        module = recipe._module(job.config, target, network, compute_of(job.config, target))
        module._sum_over_ranks = lambda value: value
        rows = prepare_data(job.config, target).rows
        features = as_features(collate([rows[i] for i in range(8)], target.facts.pad_token_id))
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            loss = module.objective_of(features, step=0).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], (drafter, losses)
        assert all(p.grad is not None for p in network.parameters()), drafter


def test_a_batch_with_nothing_supervised_gives_a_finite_zero_loss(make_job: MakeJob) -> None:
    for drafter in DRAFTERS:
        job = make_job(f"drafter={drafter}")
        target = open_target(job.config)
        network = build_drafter(job.config, target)
        module = recipe._module(job.config, target, network, compute_of(job.config, target))
        module._sum_over_ranks = lambda value: value
        rows = prepare_data(job.config, target).rows
        batch = collate([rows[0], rows[1]], target.facts.pad_token_id)
        batch["supervised"] = torch.zeros_like(batch["supervised"])
        result = module.objective_of(as_features(batch), step=0)
        result.loss.backward()
        assert result.loss.item() == 0.0
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, (drafter, name)
            assert not parameter.grad.any(), (drafter, name)


def test_a_checkpoint_of_another_drafter_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("drafter=dflash")
    target = open_target(job.config)
    module = recipe._module(job.config, target, build_drafter(job.config, target), compute_of(job.config, target))
    torch.save({"state_dict": {"drafter.x": torch.zeros(1)}, "global_step": 1}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_drafter(tmp_path / "x.ckpt", module)


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    schedule = Optimization(lr=1.0, num_steps=100, warmup_ratio=0.04)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(factors) == 1.0
    assert factors[100] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ConfigError, match="lr=0"):
        Optimization(lr=0, num_steps=10)


def test_the_ramp_moves_from_cross_entropy_to_the_papers_weights() -> None:
    from dspark_exp.objectives import BlockObjective

    objective = BlockObjective(0.1, 0.9, 1.0, ramp=0.5)
    assert objective.weights_at(0.0) == pytest.approx((1.0, 0.0))
    assert objective.weights_at(0.25) == pytest.approx((0.55, 0.45))
    assert objective.weights_at(0.5) == objective.weights_at(1.0) == pytest.approx((0.1, 0.9))
    assert BlockObjective(0.1, 0.9, 1.0).weights_at(0.0) == pytest.approx((0.1, 0.9))


def test_waiting_for_data_is_measured_between_steps_and_not_over_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    module, wait = MagicMock(), callbacks.DataWait()

    def step(arrives: float, ends: float) -> None:
        now[0] = arrives
        wait.on_train_batch_start(MagicMock(), module, None, 0)
        now[0] = ends
        wait.on_train_batch_end(MagicMock(), module, None, None, 0)

    step(5, 7)  # the first batch has nothing to wait behind
    step(8, 10)  # waited 1
    wait.on_validation_start(MagicMock(), module)
    step(50, 52)  # 40 seconds of validation
    assert (wait.waiting_s, wait.working_s) == (1, 6)
    assert wait.share == pytest.approx(1 / 7)
    module.log.assert_called_with("train/data_wait_share", pytest.approx(1 / 7))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_step_is_the_same_step(make_job: MakeJob) -> None:
    results = [train_eval(make_job(f"trainer.compile={flag}", "trainer.max_steps=4")) for flag in ("false", "true")]
    plain, compiled = (result["training"]["learning_curve"] for result in results)
    assert compiled == plain
    assert results[0]["rows"][0]["emitted_by_prompt"] == results[1]["rows"][0]["emitted_by_prompt"]
