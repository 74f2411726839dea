"""A packed batch is the padded one without the padding: same loss, same gradients, fewer rows through the layers."""

from __future__ import annotations

import pytest
import torch

from dspark_exp.contracts import TargetFeatures
from dspark_exp.data.anchors import blocks_at, draw_anchors
from dspark_exp.drafters.packing import Index, Packing
from dspark_exp.objectives import BlockObjective, ObjectiveResult, TrainingTimeTestObjective
from dspark_exp.targets import Target
from tests.conftest import BLOCK_SIZE, make_drafter

LENGTHS = (9, 24, 13)
KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3")


def _rows(target: Target) -> list[TargetFeatures]:
    """Three conversations of different lengths, each alone and without padding."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(2, target.facts.vocab_size - 1, (1, length), generator=generator)
        taps, final = target.features(ids, torch.ones_like(ids))
        marks = torch.arange(length)[None] >= 3
        rows.append(TargetFeatures(ids, marks, taps, final, torch.tensor([length])))
    return rows


def _padded(rows: list[TargetFeatures]) -> TargetFeatures:
    """The batch as the loader gives it, with garbage where the padding is."""
    longest = max(LENGTHS)
    parts = {}
    for name in ("input_ids", "supervised", "taps", "final"):
        tensors = [getattr(row, name) for row in rows]
        garbage = torch.ones((len(rows), longest, *tensors[0].shape[2:]), dtype=tensors[0].dtype) * (
            name != "supervised"
        )
        for index, tensor in enumerate(tensors):
            garbage[index, : tensor.shape[1]] = tensor[0]
        parts[name] = garbage
    return TargetFeatures(**parts, lengths=torch.tensor(LENGTHS))


def _loss(drafter: torch.nn.Module, features: TargetFeatures, anchors: list[list[int]]) -> ObjectiveResult:
    if getattr(drafter, "autoregressive"):  # noqa: B009
        normed = [drafter.norm(hidden) for hidden in drafter(features, BLOCK_SIZE)]
        return TrainingTimeTestObjective()(normed, features, drafter.frozen, lambda value: value)
    width = max(len(row) for row in anchors)
    positions = torch.tensor([row + [0] * (width - len(row)) for row in anchors])
    keep = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in anchors])
    blocks = blocks_at(features.input_ids, features.supervised, positions, keep, BLOCK_SIZE)
    output = drafter(features, blocks)
    return BlockObjective(0.1, 0.9, 1.0)(output, blocks, features, drafter.frozen, 1.0, lambda value: value)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_unpacked_in_loss_and_gradient(target: Target, kind: str) -> None:
    rows, anchors = _rows(target), [[4], [5, 20, 11, 8], [6, 10]]
    drafter = make_drafter(kind, target)
    packed = _loss(drafter, _padded(rows), anchors)
    packed.loss.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    alone = [_loss(drafter, row, [at]) for row, at in zip(rows, anchors, strict=True)]
    total = sum(result.weight for result in alone)
    joined = sum(result.loss * result.weight for result in alone) / total
    joined.backward()
    torch.testing.assert_close(packed.loss, joined, atol=1e-6, rtol=1e-6)
    for name, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                grads[name], parameter.grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("kind", "rows"), [("dflash", 4 + 20 + 10), ("eagle3", sum(LENGTHS))])
def test_padding_does_not_reach_the_linear_layers(target: Target, kind: str, rows: int) -> None:
    """DFlash projects the context before the last anchor of each row; Eagle3 every token that is not padding."""
    drafter, seen = make_drafter(kind, target), []
    fc = drafter.fc if kind == "eagle3" else drafter.backbone.fc
    fc.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[:-1].numel()))
    _loss(drafter, _padded(_rows(target)), [[4], [5, 20, 11, 8], [6, 10]])
    assert seen == [rows]


def test_blocks_without_a_live_slot_are_not_computed(target: Target) -> None:
    drafter, features, seen = make_drafter("dflash", target), _padded(_rows(target)), []
    drafter.backbone.norm.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[0]))
    blocks = draw_anchors(features.input_ids, features.supervised, 12, BLOCK_SIZE, torch.Generator().manual_seed(0))
    drafter(features, blocks)
    possible = sum(min(12, length - 3 - 1) for length in LENGTHS)  # anchors: t and t+1 both supervised
    assert seen == [possible]
    assert blocks.live.shape[:2].numel() > possible


def test_index_round_trips() -> None:
    keep = torch.tensor([[True, False, True, True], [False, False, False, True], [False] * 4])
    index, values = Index.of(keep), torch.arange(24.0).view(3, 4, 2)
    packed = index.pack(values)
    assert packed.tolist() == values[keep].tolist()
    assert index.used == 3
    grid = index.to_grid(packed)
    assert grid.shape == (3, 3, 2)
    assert grid[1, 0].tolist() == values[1, 3].tolist()
    assert grid[2].abs().sum() == 0
    assert index.from_grid(grid).equal(packed)
    assert index.unpack(packed).equal(values * keep[..., None])


def test_a_batch_with_nothing_live_still_runs_one_block() -> None:
    packing = Packing.of(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool), 5)
    assert packing.blocks.padded.tolist() == [0]
    assert len(packing.context.padded) == 2


@pytest.mark.parametrize("convention", ["live", "released"])
def test_eagle3_computes_only_what_the_objective_counts(target: Target, convention: str) -> None:
    """Prompts, unsupervised turns and the ends of rows are left out, and nothing that is trained on changes."""
    features, objective = _padded(_rows(target)), TrainingTimeTestObjective(convention=convention)
    features.supervised[1, 9:13] = False  # a second turn of the user
    drafter = make_drafter("eagle3", target)
    needed = objective.needed(features, BLOCK_SIZE)
    assert needed.sum() < sum(LENGTHS)
    results, grads = [], []
    for mask in (None, needed):
        drafter.zero_grad()
        steps = drafter(features, BLOCK_SIZE, mask)
        result = objective([drafter.norm(hidden) for hidden in steps], features, drafter.frozen, lambda value: value)
        result.loss.backward()
        results.append(result.loss.detach())
        grads.append({name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None})
    assert not steps[-1][~needed].any()
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-5)


def test_eagle3_with_nothing_to_train_on_runs_and_has_no_gradient(target: Target) -> None:
    features = _padded(_rows(target))
    features.supervised[:] = False
    drafter, objective = make_drafter("eagle3", target), TrainingTimeTestObjective()
    steps = drafter(features, BLOCK_SIZE, objective.needed(features, BLOCK_SIZE))
    result = objective([drafter.norm(hidden) for hidden in steps], features, drafter.frozen, lambda value: value)
    result.loss.backward()
    assert float(result.loss.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())
