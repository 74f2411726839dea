"""The chunked loss equals the plain formula in value and gradient, for every term and any chunk size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_exp.contracts import FrozenHead, TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.drafters.block import BlockOutput
from dspark_exp.objectives import BlockObjective, slot_losses

M, U, V, D, R = 23, 9, 50, 8, 5


def _inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {
        "hidden": make(M, D),
        "head": make(V, D),
        "features": make(M, R),
        "bias": make(V, R),
        "final": make(U, D),
        "position": torch.randint(0, U, (M,), generator=g).sort().values,
        "labels": torch.randint(0, V, (M,), generator=g),
        "weights": torch.rand(M, generator=g, dtype=torch.float64).to(dtype),
    }


def _plain(
    x: dict[str, Tensor], ce: float, l1: float, soft_ce: float, bias: bool, cap: float | None = None
) -> tuple[Tensor, ...]:
    capped = (lambda z: z) if cap is None else (lambda z: cap * torch.tanh(z / cap))
    logits = capped(x["hidden"] @ x["head"].T)
    if bias:
        logits = logits + x["features"] @ x["bias"].T
    p = capped(x["final"] @ x["head"].T).softmax(-1)[x["position"]]
    q = logits.softmax(-1)
    cross = torch.nn.functional.cross_entropy(logits, x["labels"], reduction="none")
    distance = (q - p).abs().sum(-1)
    soft = -(p * logits.log_softmax(-1)).sum(-1)
    return (x["weights"] * (ce * cross + l1 * distance + soft_ce * soft)).sum(), cross, distance, soft


def _fused(
    x: dict[str, Tensor],
    ce: float,
    l1: float,
    soft_ce: float,
    bias: bool,
    cap: float | None = None,
    chunk: int = 1 << 23,
):
    features, weight = (x["features"], x["bias"]) if bias else (None, None)
    return slot_losses(
        x["hidden"], x["head"], features, weight, x["final"], x["position"], x["labels"], x["weights"],
        ce=ce, l1=l1, soft_ce=soft_ce, softcap=cap, chunk_elements=chunk,
    )  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("coefficients", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 0.9, 0), (0.3, 0.5, 0.2)])
@pytest.mark.parametrize("chunk", [1, 4 * V, 1 << 23])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_value_and_gradient_equal_the_plain_formula(
    bias: bool, coefficients: tuple[float, float, float], chunk: int, cap: float | None
) -> None:
    results = []
    for function in (_plain, lambda *a: _fused(*a, chunk=chunk)):
        x = _inputs()
        leaves = [x[name].requires_grad_() for name in (("hidden", "features", "bias") if bias else ("hidden",))]
        out = function(x, *coefficients, bias, cap)
        total, terms = (out[0], out[1:]) if isinstance(out, tuple) else (out.total, (out.ce, out.l1, out.soft_ce))
        terms = terms if coefficients[2] else terms[:2]  # soft cross-entropy is computed where it counts
        (3.0 * total).backward()  # a factor, so that a lost upstream gradient shows
        results.append([total.detach(), *(t.detach().double() for t in terms), *(leaf.grad for leaf in leaves)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))


def test_float32_agrees_to_single_precision() -> None:
    x = _inputs(torch.float32)
    x["hidden"].requires_grad_()
    found = _fused(x, 0.1, 0.9, 0.0, True).total
    found.backward()
    y = _inputs()
    y["hidden"].requires_grad_()
    wanted = _plain(y, 0.1, 0.9, 0.0, True)[0]
    wanted.backward()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x["hidden"].grad.double(), y["hidden"].grad, rtol=1e-4, atol=1e-6)


def test_gradcheck_in_double_precision() -> None:
    x = _inputs(seed=4)
    leaves = tuple(x[name].requires_grad_() for name in ("hidden", "features", "bias"))

    def function(hidden: Tensor, features: Tensor, bias: Tensor) -> Tensor:
        return _fused({**x, "hidden": hidden, "features": features, "bias": bias}, 0.4, 0.0, 0.6, True, 4 * V).total

    assert torch.autograd.gradcheck(function, leaves, eps=1e-5, atol=1e-4)


def test_acceptance_is_one_minus_half_the_distance() -> None:
    x = _inputs()
    losses = _fused(x, 1.0, 0.0, 0.0, True)
    torch.testing.assert_close(losses.accept.double(), 1 - _plain(x, 0, 1, 0, True)[2] / 2, rtol=1e-6, atol=1e-6)


def test_nothing_live_gives_a_finite_zero_loss_and_zero_gradients() -> None:
    x = {name: t[:0] if name not in ("head", "bias") else t for name, t in _inputs(torch.float32).items()}
    leaves = [x[name].requires_grad_() for name in ("hidden", "features", "bias")]
    total = _fused(x, 0.1, 0.9, 0.0, True).total
    total.backward()
    assert total.item() == 0.0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_padded_vocabulary_rows_take_no_part_in_the_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, padded_head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)
    real_head = torch.nn.Linear(D, V - 6, bias=False)
    real_head.weight = torch.nn.Parameter(padded_head.weight[:-6].detach().clone())
    ids = torch.randint(0, V - 6, (2, 12), generator=generator)
    marks = torch.ones_like(ids, dtype=torch.bool)
    final = torch.randn(2, 12, D, generator=generator)
    features = TargetFeatures(ids, marks, torch.zeros(2, 12, D), final)
    blocks = draw_anchors(ids, marks, 3, 4, generator)
    hidden = torch.randn(2, 3, 4, D, generator=generator)
    bias_features, bias_weight = torch.randn(2, 3, 4, R, generator=generator), torch.randn(V, R, generator=generator)
    losses = []
    for head, usable, weight in ((padded_head, V - 6, bias_weight), (real_head, None, bias_weight[:-6])):
        output = BlockOutput(hidden, bias_features, weight, None)
        frozen = FrozenHead(embedding, head, usable)
        losses.append(BlockObjective(0.1, 0.9, 0.0)(output, blocks, features, frozen, 1.0, lambda x: x).loss)
    torch.testing.assert_close(*losses)
    everything = FrozenHead(embedding, padded_head)
    output = BlockOutput(hidden, bias_features, bias_weight, None)
    with_padding = BlockObjective(0.1, 0.9, 0.0)(output, blocks, features, everything, 1.0, lambda x: x).loss
    assert (with_padding - losses[0]).abs().item() > 1e-3
