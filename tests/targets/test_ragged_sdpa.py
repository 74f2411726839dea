"""Runs of the sdpa backend: equal to a loop over queries, and cut where all calls together are cheapest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_exp.targets import RaggedKVCache
from dspark_exp.targets.ragged_sdpa import cheapest_cuts, make_runs

CPU = torch.device("cpu")


def _naive(
    cache: RaggedKVCache, query_BHD: Tensor, rows: list[int], positions: list[int], seen: list[int], window: int | None
) -> Tensor:
    out = []
    for query, row, position, end in zip(query_BHD, rows, positions, seen, strict=True):
        start = 0 if window is None else max(0, position - window + 1)
        keys, values = (part[0][row, :, start:end].repeat_interleave(3, 0) for part in (cache.keys, cache.values))
        weights = torch.softmax(torch.einsum("hd,hkd->hk", query, keys) * 0.25, dim=-1)
        out.append(torch.einsum("hk,hkd->hd", weights, values))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 40, 5000])
@pytest.mark.parametrize(
    ("rows", "starts", "counts"),
    [
        ([0, 1, 2, 3], [0, 0, 0, 0], [900, 30, 7, 1]),  # prompts of very different length
        ([0, 1, 2, 3], [700, 690, 3, 12], [8, 8, 8, 8]),  # whole blocks
        ([0, 1, 2, 3], [700, 690, 3, 12], [1, 5, 2, 3]),  # scheduled ones
        ([3, 1, 2, 0], [0, 2, 0, 880], [4, 1, 300, 2]),  # prompts beside rounds, rows out of order
        ([2], [17], [1]),
    ],
)
def test_runs_equal_a_loop_over_queries(
    rows: list[int], starts: list[int], counts: list[int], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = RaggedKVCache([(2, 16)], 4, 1000, torch.float32, CPU)
    stored = torch.randn(2, 4, 2, 1000, 16, generator=generator)
    cache.keys[0][:], cache.values[0][:] = stored
    query = torch.randn(sum(counts), 6, 16, generator=generator)
    key, value = torch.randn(2, sum(counts), 2, 16, generator=generator)
    plan = cache.causal_pass(rows, starts, counts)
    got = plan.attend(0, query, key, value, 0.25, window)
    flat = [
        (row, position)
        for row, start, n in zip(rows, starts, counts, strict=True)
        for position in range(start, start + n)
    ]
    expected = _naive(cache, query, [r for r, _ in flat], [p for _, p in flat], [p + 1 for _, p in flat], window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_cuts_are_the_cheapest_of_all() -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        number = int(generator.integers(1, 8))
        counts, widths = generator.integers(1, 9, number), generator.integers(1, 2000, number)

        def cost(cuts: tuple[int, ...], counts: np.ndarray = counts, widths: np.ndarray = widths) -> float:
            calls = itertools.pairwise(cuts)
            return sum(250 + (j - i) * widths[i:j].max() * (1 + counts[i:j].max() / 6) for i, j in calls)

        inner = range(1, number)
        every = [(0, *chosen, number) for size in range(number) for chosen in itertools.combinations(inner, size)]
        assert cost(tuple(cheapest_cuts(counts, widths, 250.0))) == pytest.approx(min(map(cost, every)))


def test_one_long_prompt_does_not_set_the_price_of_the_others() -> None:
    starts = [4000] + [100] * 31
    cache = RaggedKVCache([(1, 8)] * 30, 32, 4100, torch.float32, CPU)
    runs = cache.causal_pass(list(range(32)), starts, [8] * 32).runs
    read = sum(len(run.position_RQ) * run.width for run in runs)
    assert read < 1.1 * sum(start + 8 for start in starts)
    assert read < 0.06 * 32 * 4008  # what one padded call would read


def test_requests_of_one_size_go_through_one_call() -> None:
    rows = list(range(16))
    ones = torch.ones(16, dtype=torch.long)
    runs = make_runs(rows, [1] * 16, 200 * ones, 201 * ones, 30, CPU)
    assert len(runs) == 1
    assert runs[0].mask_of(None, 3, torch.float32) is None  # every query sees every key
