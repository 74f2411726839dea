"""Sequential Temperature Scaling: against a naive grid, a known truth, and the promises of its docstring."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from dspark_exp.calibration import (
    METHODS,
    Calibration,
    Observations,
    expected_calibration_error,
    fit_method,
    fit_sts,
    identity,
    logit,
    read_calibration,
    read_shards,
)
from dspark_exp.calibration.sts import GRID, TOLERANCE
from dspark_exp.errors import ConfigError, DataError


def _observed(seed: int, temperatures: tuple[float, ...], count: int = 20_000) -> Observations:
    """Rounds whose true conditional acceptance is sigmoid(z / T_k): raw confidences are off by T."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.5, 2.0, (count, len(temperatures)))
    passed = generator.random(logits.shape) < 1 / (1 + np.exp(-logits / np.array(temperatures)))
    return Observations(logits, passed.cumprod(1).sum(1), np.full(count, len(temperatures)), np.arange(count) // 10)


def test_ece_equals_torchmetrics() -> None:
    generator = np.random.default_rng(0)
    predicted, outcome = generator.random(500).astype(np.float32), generator.random(500) < 0.4
    wanted = binary_calibration_error(torch.tensor(predicted), torch.tensor(outcome).long(), n_bins=20)
    assert expected_calibration_error(predicted, outcome) == pytest.approx(float(wanted), abs=1e-6)


def test_known_temperatures_are_found_and_error_falls_on_other_data() -> None:
    truth = (2.0, 0.6, 1.0, 1.5)
    calibration = fit_sts(_observed(0, truth))
    assert calibration.temperatures == pytest.approx(truth, rel=0.2)
    other = _observed(1, truth)
    for k in range(4):
        raw = other.confidence.cumprod(1)[:, k]
        fitted = calibration.apply(other.confidence).cumprod(1)[:, k]
        after = expected_calibration_error(fitted, other.survived(k))
        assert after < 0.02
        if k == 0:
            assert after < 0.5 * expected_calibration_error(raw, other.survived(k))


def test_each_temperature_is_the_best_of_a_naive_grid_with_earlier_ones_held() -> None:
    seen = _observed(2, (1.7, 1.2, 0.8), count=800)
    fitted = fit_sts(seen)
    for k in range(3):
        held = np.ones(len(seen))
        for i in range(k):
            held = held * (1 / (1 + np.exp(-seen.logits[:, i] / fitted.temperatures[i])))

        def error(t: float, k: int = k, held: np.ndarray = held) -> float:
            predicted = held / (1 + np.exp(-seen.logits[:, k] / t))
            total = 0.0
            for low in np.arange(20) / 20:
                inside = (np.minimum((predicted * 20).astype(int), 19) == round(low * 20)).nonzero()[0]
                if len(inside):
                    total += abs(predicted[inside].sum() - (seen.accepted[inside] > k).sum())
            return total / len(seen)

        errors = {float(t): error(t) for t in GRID}
        best = min(errors, key=errors.__getitem__)
        outcome = seen.accepted > k
        spread = np.sqrt(((held / (1 + np.exp(-seen.logits[:, k] / best)) - outcome) ** 2).sum()) / len(seen)
        assert error(fitted.temperatures[k]) <= errors[best] + TOLERANCE * spread + 1e-12
        nearer = [t for t in errors if abs(np.log(t)) < abs(np.log(fitted.temperatures[k])) - 1e-9]
        assert all(errors[t] > errors[best] + TOLERANCE * spread for t in nearer)


def test_order_within_a_position_is_kept() -> None:
    confidence = np.sort(np.random.default_rng(0).random((50, 3)), axis=0)
    calibrated = Calibration((0.3, 1.0, 4.0)).apply(confidence)
    assert (np.diff(calibrated, axis=0) >= 0).all()
    assert identity(3).apply(confidence) == pytest.approx(confidence, abs=1e-6)


def test_only_verified_positions_count() -> None:
    seen = _observed(3, (1.5, 1.5), count=4000)
    cut = Observations(seen.logits, np.minimum(seen.accepted, 1), np.ones(len(seen), dtype=int), seen.group)
    calibration = fit_sts(cut)
    assert calibration.temperatures[0] == pytest.approx(fit_sts(seen).temperatures[0])
    assert calibration.temperatures[1] == calibration.temperatures[0]  # nothing was seen there
    assert np.isnan(calibration.ece_after[1])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_confidences_and_survivals_that_never_rise(name: str) -> None:
    seen = _observed(4, (2.0, 1.4, 1.0), count=3000)
    calibrated = fit_method(name, seen)(seen.confidence)
    assert calibrated.shape == seen.confidence.shape
    assert (calibrated >= 0).all()
    assert (calibrated <= 1).all()
    assert (np.diff(calibrated.cumprod(1), axis=1) <= 0).all()
    error = expected_calibration_error(calibrated[:, 0], seen.survived(0))
    assert error < 0.03 or name == "raw"


def test_a_position_with_one_outcome_keeps_its_confidences() -> None:
    seen = Observations(np.zeros((30, 1)), np.ones(30, dtype=int), np.ones(30, dtype=int), np.arange(30))
    for name in ("isotonic", "platt", "beta"):
        assert fit_method(name, seen)(seen.confidence) == pytest.approx(seen.confidence)
    with pytest.raises(ConfigError, match="isotonic"):
        fit_method("histogram", seen)


def test_files_are_those_that_engines_read_and_come_back(tmp_path: Path) -> None:
    calibration = fit_sts(_observed(5, (1.3, 1.1), count=500), dataset="chat")
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(calibration.as_dict()))
    assert read_calibration(path) == calibration
    stored = json.loads(path.read_text())
    assert stored["temperatures"] == stored["sts_temperatures"] == list(calibration.temperatures)
    assert stored["num_samples"] == 500
    path.write_text(json.dumps({"sts_temperatures": [1.5, 2.0]}))
    assert read_calibration(path).temperatures == (1.5, 2.0)
    for bad in ("{}", '{"temperatures": [0.0]}', "no json"):
        path.write_text(bad)
        with pytest.raises(ConfigError):
            read_calibration(path)
    with pytest.raises(ConfigError, match="2 temperatures"):
        calibration.check(7)


def test_shards_of_an_engine_give_the_same_fit(tmp_path: Path) -> None:
    seen = _observed(6, (1.8, 0.9, 1.2), count=600)
    mask = (seen.accepted[:, None] > np.arange(3)).astype(np.float32)
    for n, part in enumerate((slice(0, 250), slice(250, 600))):
        shard = {"logits": torch.tensor(seen.logits[part]).float(), "prefix_mask": torch.tensor(mask[part])}
        torch.save(shard, tmp_path / f"rank0.{n}.pt")
    read = read_shards(str(tmp_path / "rank0.*.pt"))
    assert len(read) == 600
    assert read.accepted.tolist() == seen.accepted.tolist()
    assert fit_sts(read).temperatures == pytest.approx(fit_sts(seen).temperatures, rel=1e-3)
    assert len(read_shards(str(tmp_path))) == 600


def test_shards_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        read_shards(str(tmp_path / "*.pt"))
    torch.save({"logits": torch.zeros(2, 3), "prefix_mask": torch.tensor([[1.0, 0, 1], [0, 0, 0]])}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="rises along a row"):
        read_shards(str(tmp_path))
    torch.save({"logits": torch.zeros(2, 3)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="no calibration shard"):
        read_shards(str(tmp_path))


def test_rounds_become_observations() -> None:
    rounds = [
        [{"confidence": (0.9, 0.5), "accepted": 1, "verified": 2}],
        [{"confidence": (0.2, 1.0), "accepted": 0, "verified": 1}],
    ]
    seen = Observations.of_rounds(rounds)
    assert seen.confidence == pytest.approx(np.array([[0.9, 0.5], [0.2, 1.0]]), abs=1e-6)
    assert seen.reached(1).tolist() == [True, False]
    assert seen.seen(1).tolist() == [True, False]
    assert seen.group.tolist() == [0, 1]
    assert np.isfinite(logit(np.array([0.0, 1.0]))).all()
    with pytest.raises(DataError, match="confidence_head"):
        Observations.of_rounds([[{"confidence": (), "accepted": 0, "verified": 1}]])
    joined = Observations.join([seen, seen])
    assert joined.group.tolist() == [0, 1, 2, 3]
