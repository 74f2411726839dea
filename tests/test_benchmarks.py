"""Benchmarks run and write the keys that are read by name; what they count is right on worked cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from measure import flops, peak_bytes  # noqa: E402
from train_step import SMALL, build, dense, gradients, ours  # noqa: E402


def test_peak_bytes_of_a_known_sequence() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        a = torch.ones(1000, 1000)  # 4 MB
        b = a + 1  # 8 MB held
        del a
        kept.append(b + 1)  # 8 MB held

    assert peak_bytes(work, torch.device("cpu")) == pytest.approx(8e6, rel=0.01)
    kept.clear()
    without_result = peak_bytes(work, torch.device("cpu"), lambda: {kept[0].data_ptr()})
    assert without_result == pytest.approx(8e6, rel=0.01)  # a and b; the result does not count


def test_flops_count_products_in_place() -> None:
    a, b, out = torch.randn(3, 5), torch.randn(5, 7), torch.zeros(3, 7)
    assert flops(lambda: a @ b) == flops(lambda: out.addmm_(a, b)) == 2 * 3 * 5 * 7


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_step_has_the_dense_implementations_gradients(checkpoint: bool) -> None:
    step = build(SMALL, torch.device("cpu"), checkpoint)
    plain, chunked = gradients(step, dense), gradients(step, ours)
    assert plain.keys() == chunked.keys()
    for name, wanted in plain.items():
        error = float((chunked[name] - wanted).norm() / wanted.norm().clamp(min=1e-12))
        assert error < 1e-4, name


def test_memory_and_work_at_qwen3_4b_size_are_computed_without_running(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), "--device", "meta", "--json", "out.json"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["computed_mb"] < 6000
    assert row["tflop"] > 10


@pytest.mark.slow
def test_the_decoding_benchmark_runs_on_the_embedded_target(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "decode.py"), "--num-prompts", "2", "--new-tokens", "6"]
    subprocess.run([*command, "--json", "out.json"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert {"batch32_over_batch1", "spec_over_plain_batch1", "break_even_tau"} <= result.keys()
