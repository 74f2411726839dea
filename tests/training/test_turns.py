"""Arms that train in turns: one works at a time, the one furthest behind; features of a batch are computed once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dspark_exp.training import SharedFeatures, Turns
from dspark_exp.training.turns import Stopped


def _run(begin_at: list[int], num_batches: int) -> list[tuple[int, int]]:
    """(arm, batch) in the order in which they were worked on; arms begin at the given batch, as resumed ones do."""
    turns, done, working = Turns(len(begin_at)), [], threading.Lock()

    def arm(number: int) -> None:
        turns.take(number, -1)
        for batch in range(begin_at[number], num_batches):
            turns.take(number, batch)
            assert working.acquire(blocking=False), "two arms work at once"
            done.append((number, batch))
            working.release()
        turns.leave(number)

    with ThreadPoolExecutor(len(begin_at)) as pool:
        for future in [pool.submit(arm, number) for number in range(len(begin_at))]:
            future.result()
    return done


def test_arms_go_batch_by_batch() -> None:
    assert _run([0, 0, 0], 4) == [(arm, batch) for batch in range(4) for arm in range(3)]


def test_a_resumed_arm_waits_until_the_others_have_caught_up() -> None:
    assert _run([2, 0], 4) == [(1, 0), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_an_arm_that_ends_early_holds_nobody() -> None:
    turns = Turns(2)
    turns.leave(0)
    turns.take(1, 5)


def test_a_stop_wakes_those_that_wait() -> None:
    turns = Turns(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turns.take, 1, 0)
        turns.stop()
        with pytest.raises(Stopped):
            waiting.result(timeout=10)


def test_features_are_computed_once_for_those_who_ask_for_the_same_batch() -> None:
    def compute(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ids[..., None] * 2.0, mask[..., None] * 1.0

    shared = SharedFeatures(compute)
    ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.long)
    first = shared(ids, mask)
    assert shared(ids.clone(), mask.clone()) is first
    for other in ((ids + 1, mask), (ids, mask * 0), (ids[:1], mask[:1])):
        taps, final = shared(*other)
        assert torch.equal(taps, compute(*other)[0])
        assert torch.equal(final, compute(*other)[1])
    assert (shared.num_asked, shared.num_computed) == (5, 4)
