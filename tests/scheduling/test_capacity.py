"""The capacity table: measured points stay, files are those that engines read, other machines are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling import CapacityCurve, CapacityTable, Rounds, read_table

TABLE = CapacityTable(
    tokens=[1, 2, 4],
    context_lengths=[64, 256],
    seconds=[[1.0, 3.0, 2.0], [2.0, 4.0, 3.0]],
    spread=[[0.1] * 3, [0.1] * 3],
    rounds={
        "requests": [1, 2], "lengths": [0, 1, 2], "seconds": [[2.0, 3.0, 3.5], [4.0, 5.0, 5.0]], "plain": [1.0, 2.0],
        "prompt_tokens": [8, 16], "enter": [1.0, 2.0],
    },
    measured={"model": "tiny", "revision": "r", "dtype": "float32", "device": "cpu"},
)  # fmt: skip


def test_a_jagged_curve_stays_jagged() -> None:
    curve = CapacityCurve(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0]))
    assert curve.step_s([1, 2, 3, 4]).tolist() == [1.0, 3.0, 2.5, 2.0]
    assert curve.steps_per_s(4) == 0.5
    assert curve.step_s(100) == 2.0  # the last slope falls: no gain is promised beyond what was measured
    rising = CapacityCurve(np.array([1.0, 3.0]), np.array([1.0, 2.0]))
    assert rising.step_s(7) == 4.0


def test_whole_rounds_are_looked_up_by_requests_and_mean_length() -> None:
    curve = TABLE.curve()
    assert curve.round_s(1, [1, 2]).tolist() == [2.0, 3.0]
    assert curve.round_s(2, [2, 3, 4]).tolist() == [4.0, 4.5, 5.0]
    assert float(curve.round_s(2, 6)) == 5.0  # whole blocks, as measured
    assert float(curve.round_s(2, 5)) == 5.5  # nearly whole blocks: on the line through shorter ones, 6 at its end
    assert curve.plain_s(2) == 2.0
    assert curve.plain_s(3) == 3.0
    assert curve.enter_s(12) == 1.5
    assert float(TABLE.curve(256).round_s(1, 1)) == 3.0  # as much longer as the pass


def test_without_rounds_drafting_is_free() -> None:
    curve = CapacityCurve.of_steps_per_s([1, 2, 3], [1.0, 0.5, 0.25])
    assert curve.round_s(1, [1, 2, 3]).tolist() == [1.0, 2.0, 4.0]
    assert curve.plain_s(2) == 2.0


def test_the_file_comes_back_and_has_the_engines_fields(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TABLE.as_dict()))
    assert read_table(path) == TABLE
    stored = json.loads(path.read_text())
    assert stored["sample_steps_per_sec"] == [1.0, pytest.approx(1 / 3), 0.5]
    path.write_text(json.dumps({"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [10.0, 5.0]}))
    assert read_table(path).curve().step_s(4) == 0.2
    for bad in ("{}", "no json", '{"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="task=profile_capacity"):
            read_table(path)
    with pytest.raises(ConfigError, match="task=profile_capacity"):
        read_table(tmp_path / "none.json")


def test_a_table_of_another_machine_is_refused_unless_forced() -> None:
    TABLE.check({"model": "tiny", "device": "cpu"})
    with pytest.raises(ConfigError, match=r"device 'cpu' \(here 'H200'\).*scheduling\.force"):
        TABLE.check({"model": "tiny", "device": "H200"})
    TABLE.check({"model": "tiny", "device": "H200"}, force=True)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [([], []), ([1, 1], [1, 1]), ([1, 2], [1]), ([1, 2], [1, 0]), ([2, 1], [1, 1])]
)
def test_curves_that_cannot_be_are_refused(tokens: list[float], seconds: list[float]) -> None:
    with pytest.raises(ConfigError, match="capacity curve"):
        CapacityCurve(np.array(tokens, float), np.array(seconds, float))


def test_rounds_without_entry_times_fall_back_to_the_pass() -> None:
    rounds = Rounds(np.array([1.0]), np.array([0.0, 1.0]), np.array([[2.0, 3.0]]), np.array([1.0]))
    assert CapacityCurve(np.array([1.0, 9.0]), np.array([1.0, 5.0]), rounds).enter_s(5) == 3.0
