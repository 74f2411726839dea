"""Losslessness by enumeration: every drafted block, every verdict, exact probabilities on a tiny vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dspark_exp.decoding import verify_block
from dspark_exp.decoding.sampling import draw

V = 3
G = 2


def _tables(seed: int) -> tuple[Tensor, Tensor]:
    """p_d(x_k | x_<k) and p_t(x_k | x_<k) for every prefix: lists of tensors [V**k, V]."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda rows: torch.rand(rows, V, generator=generator).pow(2).double()  # noqa: E731
    normal = lambda t: t / t.sum(-1, keepdim=True)  # noqa: E731
    return [normal(make(V**k)) for k in range(G)], [normal(make(V**k)) for k in range(G + 1)]


def _index(prefix: tuple[int, ...]) -> int:
    value = 0
    for token in prefix:
        value = value * V + token
    return value


def _emitted_distribution(length_of, seed: int) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first G+1 tokens when each block is continued from the target itself.

    ``length_of(block)`` is the verified length of a drafted block. Verdict probabilities come from integrating
    ``verify_block`` over its uniform numbers: it is piecewise constant, so cells between breakpoints are enumerated.
    """
    drafts, targets = _tables(seed)
    total: dict[tuple[int, ...], float] = {}
    for block in itertools.product(range(V), repeat=G):
        p_block = 1.0
        for k in range(G):
            p_block *= float(drafts[k][_index(block[:k]), block[k]])
        draft_probs = torch.stack([drafts[k][_index(block[:k])] for k in range(G)])[None]
        target_probs = torch.stack([targets[k][_index(block[:k])] for k in range(G + 1)])[None]
        length = length_of(block)
        for accepted, next_token, weight in _verdicts(draft_probs, target_probs, block, length):
            head = (*block[:accepted], next_token)
            # the rest of the first G+1 tokens comes from the target, which is exact by definition
            for tail in itertools.product(range(V), repeat=G + 1 - len(head)):
                p_tail = 1.0
                for j in range(len(head), G + 1):
                    p_tail *= float(targets[j][_index((*head, *tail)[:j]), (*head, *tail)[j]])
                key = (*head, *tail)
                total[key] = total.get(key, 0.0) + p_block * weight * p_tail
    return total


def _verdicts(draft_probs: Tensor, target_probs: Tensor, block: tuple[int, ...], length: int):
    """(accepted, next token, probability) by enumerating cells of the uniform cube."""
    tokens = torch.tensor([block])
    ratios = [float(target_probs[0, k, block[k]] / draft_probs[0, k, block[k]]) for k in range(G)]
    cells = [[(0.5 * min(1.0, r), min(1.0, r))] + ([((1 + r) / 2, 1 - r)] if r < 1 else []) for r in ratios]
    for choice in itertools.product(*cells):
        weight = 1.0
        for _, width in choice:
            weight *= width
        accept = torch.tensor([[u for u, _ in choice]])
        # breakpoints of the last draw: cut the unit interval finely enough that no cell is missed
        verdict = verify_block(draft_probs, target_probs, tokens, torch.tensor([length]), accept, torch.zeros(1))
        accepted = int(verdict.num_accepted)
        residual = target_probs[0, accepted].clone()
        if accepted < length:
            residual = (residual - draft_probs[0, accepted]).clamp(min=0)
        cdf = (residual / residual.sum()).cumsum(-1)
        for token in range(V):
            low = float(cdf[token - 1]) if token else 0.0
            width = float(cdf[token]) - low
            if width <= 1e-12:
                continue
            middle = torch.tensor([low + width / 2], dtype=torch.float64)
            again = verify_block(draft_probs, target_probs, tokens, torch.tensor([length]), accept, middle)
            assert int(again.next_token) == token
            yield accepted, token, weight * width


def _target_distribution(seed: int) -> dict[tuple[int, ...], float]:
    _, targets = _tables(seed)
    found = {}
    for sequence in itertools.product(range(V), repeat=G + 1):
        p = 1.0
        for k in range(G + 1):
            p *= float(targets[k][_index(sequence[:k]), sequence[k]])
        found[sequence] = p
    return found


def _assert_same(found: dict, wanted: dict) -> None:
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for sequence, p in wanted.items():
        assert found.get(sequence, 0.0) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [0, 1, 2])
def test_fixed_and_full_verification_recover_the_target_distribution(seed: int, length: int) -> None:
    _assert_same(_emitted_distribution(lambda _: length, seed), _target_distribution(seed))


@pytest.mark.parametrize("seed", range(5))
def test_non_anticipating_threshold_recovers_the_target_distribution(seed: int) -> None:
    # c_1 is a constant, c_2 depends on x_1 alone: what a confidence head may read
    def length(block: tuple[int, ...]) -> int:
        return 2 if block[0] == 1 else 1

    _assert_same(_emitted_distribution(length, seed), _target_distribution(seed))


def test_anticipating_length_is_caught_by_the_same_test() -> None:
    found = _emitted_distribution(lambda block: 1 if block[0] == 1 else 0, seed=0)
    wanted = _target_distribution(0)
    assert max(abs(found.get(s, 0.0) - p) for s, p in wanted.items()) > 1e-3


def test_rejected_token_is_resampled_from_the_residual() -> None:
    draft = torch.tensor([[[0.5, 0.5, 0.0]]])
    target = torch.tensor([[[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]])
    verdict = verify_block(
        draft, target, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[0.9]]), torch.tensor([0.5])
    )
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [2]


def test_equal_one_hot_distributions_accept_everything() -> None:
    one_hot = torch.eye(4)[None]
    verdict = verify_block(
        one_hot[:, :3], one_hot, torch.tensor([[0, 1, 2]]), torch.tensor([3]), torch.full((1, 3), 0.999), torch.rand(1)
    )
    assert verdict.num_accepted.tolist() == [3]
    assert verdict.next_token.tolist() == [3]


def test_draw_never_returns_a_token_of_probability_zero() -> None:
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    uniform = torch.cat([torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), torch.rand(1000, dtype=torch.float64)])
    tokens = draw(probs.expand(len(uniform), -1), uniform)
    assert set(tokens.tolist()) == {1, 3}


def test_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(draw(probs.expand(10_000, -1), uniform), minlength=4) / 10_000
    torch.testing.assert_close(counts, probs, atol=1e-3, rtol=0)
