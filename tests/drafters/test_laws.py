"""Laws that hold for any weights: backends agree, nothing leaks, training sees what decoding sees."""

from __future__ import annotations

import pytest
import torch

from dspark_exp.contracts import TargetFeatures
from dspark_exp.data.anchors import blocks_at, draw_anchors
from dspark_exp.decoding import Sampling
from dspark_exp.drafters.attention import attend_blocks
from dspark_exp.drafters.geometry import Geometry
from dspark_exp.errors import ConfigError
from dspark_exp.targets import Target
from tests.conftest import BLOCK_SIZE, make_cache, make_drafter

BLOCK_KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn")


def _features(target: Target, num_sequences: int = 2, length: int = 24) -> TargetFeatures:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, target.facts.vocab_size - 1, (num_sequences, length), generator=generator)
    taps, final = target.features(ids, torch.ones_like(ids))
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    supervised[:, 5:] = True
    return TargetFeatures(ids, supervised, taps, final)


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_attention_backends_agree_in_value_and_gradient(backend: str, window: int | None) -> None:
    n, s, a, g, h, k, d = 2, 13, 3, 4, 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, a, g, h, d), (n, s, k, d), (n, s, k, d), (n, a, g, k, d), (n, a, g, k, d)]
    anchors = torch.tensor([[0, 5, 9], [3, 3, 12]])  # an anchor without any context among them
    weight = torch.randn(n, a, g, h, d, generator=generator)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for name in ("eager", backend):
        leaves = [t.clone().requires_grad_(name == "eager" or backend == "sdpa") for t in inputs]
        out = attend_blocks(*leaves, anchors, d**-0.5, name, window=window)
        results.append([out.detach()])
        if leaves[0].requires_grad and backend == "sdpa":
            (out * weight).sum().backward()
            results[-1] += [leaf.grad for leaf in leaves]
    for plain, other in zip(*results, strict=False):
        torch.testing.assert_close(plain, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_changing_target_features_at_or_after_an_anchor_changes_nothing(target: Target, kind: str) -> None:
    drafter, features = make_drafter(kind, target), _features(target)
    anchors = torch.tensor([[6, 11, 8], [7, 18, 9]])
    blocks = blocks_at(
        features.input_ids, features.supervised, anchors, torch.ones_like(anchors, dtype=torch.bool), BLOCK_SIZE
    )
    before = drafter(features, blocks).hidden
    for n in range(2):
        for a in range(3):
            taps = features.taps.clone()
            taps[n, anchors[n, a] :] += 5.0
            after = drafter(TargetFeatures(features.input_ids, features.supervised, taps, features.final), blocks)
            torch.testing.assert_close(after.hidden[n, a], before[n, a], atol=0, rtol=0)
            taps[n, anchors[n, a] - 1] += 5.0  # and the one before it does
            after = drafter(TargetFeatures(features.input_ids, features.supervised, taps, features.final), blocks)
            assert not torch.allclose(after.hidden[n, a], before[n, a])


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_do_not_see_each_other(target: Target, kind: str) -> None:
    drafter, features = make_drafter(kind, target), _features(target)
    keep = torch.ones(2, 2, dtype=torch.bool)
    both = blocks_at(features.input_ids, features.supervised, torch.tensor([[8, 9], [8, 9]]), keep, BLOCK_SIZE)
    alone = blocks_at(features.input_ids, features.supervised, torch.tensor([[8], [8]]), keep[:, :1], BLOCK_SIZE)
    torch.testing.assert_close(
        drafter(features, both).hidden[:, :1], drafter(features, alone).hidden, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("window", [None, 3, 5])
def test_a_slot_sees_what_the_window_allows_and_nothing_else(target: Target, window: int | None) -> None:
    drafter, features = make_drafter("dflash", target), _features(target, 1)
    drafter.backbone.window, anchor = window, 12
    keep = torch.ones(1, 1, dtype=torch.bool)
    blocks = blocks_at(features.input_ids, features.supervised, torch.tensor([[anchor]]), keep, BLOCK_SIZE)
    before = drafter(features, blocks).hidden
    for position in range(anchor):
        taps = features.taps.clone()
        taps[0, position] += 5.0
        after = drafter(TargetFeatures(features.input_ids, features.supervised, taps, features.final), blocks).hidden
        # the first slot looks back furthest; the others hear of it in the second layer
        assert torch.equal(after, before) == (window is not None and position <= anchor - window)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_decoding_computes_what_training_computes(target: Target, kind: str, window: int | None) -> None:
    """The drafted block of the cached path equals the teacher-forced block of the training path on its own tokens."""
    drafter, features = make_drafter(kind, target), _features(target, 1)
    drafter.backbone.window = window
    anchor = 9
    store = make_cache(*_rows(drafter, 1))
    # context arrives in two uneven pieces, as it does in decoding
    for first, last in ((0, 4), (4, anchor)):
        drafter.extend(store, [0], [first], [last - first], features.taps[0, first:last], features.input_ids[0])
    proposal = drafter.propose(
        store, [0], [anchor], features.input_ids[:, anchor], None, Sampling(1.0), torch.rand(1, BLOCK_SIZE)
    )
    ids = features.input_ids.clone()
    ids[0, anchor + 1 : anchor + 1 + BLOCK_SIZE] = proposal.tokens[0]
    keep = torch.ones(1, 1, dtype=torch.bool)
    blocks = blocks_at(ids, torch.ones_like(features.supervised), torch.tensor([[anchor]]), keep, BLOCK_SIZE)
    output = drafter(features, blocks)
    logits = target.head.lm_head(output.hidden)
    if output.bias_features is not None:
        logits = logits + output.bias_features @ output.bias_weight.T
    torch.testing.assert_close(proposal.probs[0], logits[0, 0].softmax(-1), atol=2e-5, rtol=1e-4)
    if proposal.confidence is not None:
        torch.testing.assert_close(
            proposal.confidence[0], output.confidence_logits[0, 0].sigmoid(), atol=1e-5, rtol=1e-4
        )


def _rows(drafter, rows: int) -> tuple[int, int, int, int, int]:
    layers, kv_heads, head_dim = drafter.cache_geometry()
    return layers, rows, kv_heads, 64, head_dim


def test_eagle3_decoding_computes_what_its_training_steps_compute(target: Target) -> None:
    drafter, features = make_drafter("eagle3", target), _features(target, 1)
    anchor = 9
    store = make_cache(*_rows(drafter, 1))
    carry = drafter.extend(store, [0], [0], [anchor], features.taps[0, :anchor], features.input_ids[0, 1 : anchor + 1])
    proposal = drafter.propose(
        store, [0], [anchor], features.input_ids[:, anchor], carry, Sampling(1.0), torch.rand(1, BLOCK_SIZE)
    )
    ids = features.input_ids.clone()
    ids[0, anchor + 1 : anchor + 1 + BLOCK_SIZE] = proposal.tokens[0]
    steps = drafter(TargetFeatures(ids, features.supervised, features.taps, features.final), BLOCK_SIZE)
    for slot, hidden in enumerate(steps):
        probs = target.head.lm_head(drafter.norm(hidden[0, anchor - 1])).softmax(-1)
        torch.testing.assert_close(proposal.probs[0, slot], probs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dspark_gated", "dspark_rnn", "dspark_markov"])
def test_heads_agree_between_block_and_step(target: Target, kind: str) -> None:
    head = make_drafter(kind, target).markov_head
    hidden, previous = torch.randn(3, BLOCK_SIZE, 32), torch.randint(0, 12, (3, BLOCK_SIZE))
    whole = head.block(previous, hidden)
    state = head.start(3, hidden)
    for slot in range(BLOCK_SIZE):
        features, state = head.step(previous[:, slot], hidden[:, slot], state)
        torch.testing.assert_close(features, whole[:, slot], atol=1e-6, rtol=1e-5)


def test_a_fresh_markov_head_adds_nothing_and_still_learns(target: Target) -> None:
    from dspark_exp.drafters import DSparkDrafter

    drafter = DSparkDrafter(target.facts, target.head, 1, BLOCK_SIZE, head="markov", head_rank=4)
    features = _features(target)
    blocks = draw_anchors(features.input_ids, features.supervised, 3, BLOCK_SIZE, torch.Generator().manual_seed(0))
    output = drafter(features, blocks)
    bias = output.bias_features @ output.bias_weight.T
    assert bias.abs().max() == 0
    bias[..., 3].sum().backward()
    assert drafter.markov_head.markov_w2.weight.grad.abs().sum() > 1.0


def test_the_target_is_neither_saved_nor_trained_with_the_drafter(target: Target) -> None:
    for kind in (*BLOCK_KINDS, "eagle3"):
        names = list(make_drafter(kind, target).state_dict())
        assert not any("embed_tokens" in name or "lm_head" in name for name in names)


def test_confidence_depends_on_the_previous_token_and_never_on_its_own(target: Target) -> None:
    drafter, features = make_drafter("dspark_markov", target), _features(target, 1)
    keep = torch.ones(1, 1, dtype=torch.bool)
    before = drafter(
        features, blocks_at(features.input_ids, features.supervised, torch.tensor([[8]]), keep, BLOCK_SIZE)
    ).confidence_logits[0, 0]
    ids = features.input_ids.clone()
    ids[0, 10] = (ids[0, 10] + 1) % 10 + 1  # x_2 of the block
    after = drafter(
        features, blocks_at(ids, features.supervised, torch.tensor([[8]]), keep, BLOCK_SIZE)
    ).confidence_logits[0, 0]
    changed = ~torch.isclose(before, after)
    assert changed.tolist() == [False, False, True, False]


@pytest.mark.parametrize("setting", [{"num_layers": 0}, {"block_size": 0}, {"head": "lstm"}, {"head_rank": 0}])
def test_impossible_sizes_are_refused_by_name(target: Target, setting: dict) -> None:
    from dspark_exp.drafters import DSparkDrafter

    with pytest.raises(ConfigError, match=next(iter(setting))):
        DSparkDrafter(target.facts, target.head, **({"num_layers": 1, "block_size": 4, "head": "markov"} | setting))


def test_geometry_follows_the_target(target: Target) -> None:
    geometry = Geometry.of(target.facts, intermediate_size=20)
    assert (geometry.hidden_size, geometry.vocab_size, geometry.intermediate_size) == (32, 12, 20)
