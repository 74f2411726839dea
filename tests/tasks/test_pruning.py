"""Trials of a search that are ended early, against a median written out."""

from __future__ import annotations

import statistics

import pytest

from dspark_exp.tasks.pruning import is_hopeless


def _curve(*taus: float) -> list[dict[str, float]]:
    return [{"step": 100.0 * (index + 1), "tau": tau} for index, tau in enumerate(taus)]


FINISHED = [_curve(1.0, 2.0, 3.0), _curve(1.4, 1.8, 2.5), _curve(1.2, 2.4, 2.6)]


@pytest.mark.parametrize("taus", [(1.1,), (1.3,), (1.3, 1.9), (1.3, 2.1), (1.9, 1.0), (1.0, 2.1, 2.5)])
def test_hopeless_is_a_best_value_below_the_median_at_the_same_step(taus: tuple[float, ...]) -> None:
    median = statistics.median(curve[len(taus) - 1]["tau"] for curve in FINISHED)
    assert is_hopeless(_curve(*taus), FINISHED, prune_after=3) == (max(taus) < median)


def test_nothing_is_hopeless_before_enough_trials_have_ended() -> None:
    assert not is_hopeless(_curve(0.1), FINISHED, prune_after=4)
    assert not is_hopeless(_curve(0.1), [], prune_after=1)
