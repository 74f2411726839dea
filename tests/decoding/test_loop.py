"""The real batched loop: equal to plain decoding, exact, independent of the batch, right at the ends."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dspark_exp.calibration import Calibration
from dspark_exp.decoding import (
    DecodingBatch,
    EarlyExit,
    Fixed,
    Full,
    Request,
    Rotation,
    Sampling,
    SpeculativeLoop,
    Threshold,
)
from dspark_exp.decoding import batch as batch_module
from dspark_exp.decoding.requests import shared_prefills
from dspark_exp.drafters import BlockDrafter
from dspark_exp.errors import ConfigError
from dspark_exp.scheduling import AsyncScheduler, CapacityCurve, PrefixScheduler, Rounds, survivals
from dspark_exp.targets import Target
from tests.conftest import BLOCK_SIZE, make_cache, make_drafter, random_target

KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3")
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 2], [5], [2, 2, 9, 4], [8, 3, 8, 3, 8, 3, 8]]


def _loop(target: Target, kind: str | None, temperature: float = 0.0, policy=None, batch_size: int = 3):
    drafter = None if kind is None else make_drafter(kind, target)
    return SpeculativeLoop(target, drafter, make_cache, Sampling(temperature), policy, batch_size)


def _plain_greedy(target: Target, prompt: list[int], limit: int) -> list[int]:
    """A naive loop over the full sequence, no cache."""
    ids = list(prompt)
    while True:
        tokens = torch.tensor([ids])
        _, final = target.features(tokens, torch.ones_like(tokens))
        ids.append(int(target.logits(final)[0, -1].argmax()))
        if ids[-1] in target.facts.stop_ids or len(ids) - len(prompt) == limit:
            return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_decoding_token_for_token(family: str, kind: str) -> None:
    target = random_target(family)
    generations = _loop(target, kind).run([Request(p, 30, seed=0) for p in PROMPTS])
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids == _plain_greedy(target, prompt, 30)


@pytest.mark.parametrize("kind", [None, "dflash", "dspark_rnn", "eagle3"])
def test_output_of_a_request_does_not_depend_on_the_batch(target: Target, kind: str | None) -> None:
    requests = [Request(p, 20, seed=i) for i, p in enumerate(PROMPTS)]
    together = _loop(target, kind, 1.0, batch_size=5).run(requests)
    apart = [_loop(target, kind, 1.0, batch_size=1).run([r])[0] for r in requests]
    assert [g.token_ids for g in together] == [g.token_ids for g in apart]
    assert [g.rounds for g in together] == [g.rounds for g in apart] or all(
        [r.emitted for r in a.rounds] == [r.emitted for r in b.rounds] for a, b in zip(together, apart, strict=True)
    )


def _pair_distribution(target: Target, prompt: list[int]) -> torch.Tensor:
    """Exact p(x1, x2) after a prompt whose first token is already drawn, summed over that first token."""
    vocab = target.facts.vocab_size

    def following(ids: list[list[int]]) -> torch.Tensor:
        tokens = torch.tensor(ids)
        _, final = target.features(tokens, torch.ones_like(tokens))
        return target.logits(final[:, -1]).softmax(-1).double()

    first = following([prompt])[0]
    second = following([[*prompt, a] for a in range(vocab)])
    third = following([[*prompt, a, b] for a, b in itertools.product(range(vocab), repeat=2)]).view(vocab, vocab, vocab)
    return first[:, None, None] * second[:, :, None] * third


def _goodness_of_fit(counts: torch.Tensor, joint: torch.Tensor) -> float:
    """p-value of chi-square; rare outcomes share one cell."""
    expected = joint.double() / joint.double().sum() * float(counts.sum())
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("dflash", Full()),
        ("dspark_markov", Full()),
        ("dspark_rnn", Fixed(2)),
        ("dspark_markov", Threshold(0.45)),
        ("eagle3", Full()),
    ],
)
def test_the_real_loop_samples_the_target_distribution(kind: str, policy) -> None:
    target = random_target(vocab_size=6, stop_ids=(99,))
    prompt, num_samples = [2, 3, 4], 6000
    loop = _loop(target, kind, 1.0, policy, batch_size=500)
    generations = loop.run([Request(prompt, 3, seed=s) for s in range(num_samples)])
    joint = _pair_distribution(target, prompt)
    counts = torch.zeros_like(joint)
    for generation in generations:
        counts[tuple(generation.token_ids)] += 1
    assert _goodness_of_fit(counts, joint) > 1e-3
    if kind != "dflash":
        lengths = {r.verified for g in generations for r in g.rounds}
        assert lengths, "no round was decoded"


@pytest.mark.parametrize("kind", [None, "dspark_markov", "eagle3"])
def test_prompts_that_are_alike_share_their_prefill(
    target: Target, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10, 2], [3, 4, 5], [6, 7], [6, 7, 8, 9], [3, 4, 6], [3, 4, 5]]
    requests = [Request(ids, 12, seed) for seed, ids in enumerate(prompts)]
    apart = [_loop(target, kind, 1.0, batch_size=1).run([r])[0] for r in requests]
    passes, forward = [], Target.forward_ragged

    def count(self: Target, tokens_B: torch.Tensor, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(len(tokens_B))
        return forward(self, tokens_B, plan)

    monkeypatch.setattr(Target, "forward_ragged", count)
    together = _loop(target, kind, 1.0, batch_size=7).run(requests)
    assert passes[0] == len(prompts[0]) + len(prompts[1]) + len(prompts[5])
    assert [g.token_ids for g in together] == [g.token_ids for g in apart]
    assert len({tuple(together[i].token_ids) for i in (0, 2, 6)}) == 3  # each has its own first token and its own draws


@pytest.mark.parametrize("seed", range(20))
def test_the_prefill_of_a_prompt_is_in_one_that_it_begins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    prompts = {row: generator.integers(0, 2, generator.integers(1, 5)).tolist() for row in range(3, 12)}
    source_of = shared_prefills(prompts)
    for row, ids in prompts.items():
        source = source_of[row]
        assert prompts[source][: len(ids)] == ids
        assert source_of[source] == source
        longer = [other for other in prompts.values() if len(other) > len(ids) and other[: len(ids)] == ids]
        first_alike = min(other for other, theirs in prompts.items() if theirs == ids)
        assert (source == row) == (not longer and row == first_alike)


@pytest.mark.parametrize("limit", range(1, 9))
def test_token_limit_is_exact_inside_a_block(target: Target, limit: int) -> None:
    for generation in _loop(random_target(stop_ids=(99,)), "dspark_markov", 1.0).run(
        [Request(p, limit, seed=3) for p in PROMPTS]
    ):
        assert len(generation.token_ids) == limit
        assert generation.finish_reason == "length"
        assert sum(r.emitted for r in generation.rounds) == limit - 1


def test_tokens_after_an_accepted_end_token_do_not_exist() -> None:
    plain = _plain_greedy(random_target(stop_ids=(99,)), PROMPTS[0], 24)
    stop = max(set(plain), key=plain.index)  # the token that comes first as late as possible
    assert plain.index(stop) > BLOCK_SIZE + 1
    target = random_target(stop_ids=(stop,))

    class Oracle:
        """Drafts what greedy decoding will emit, so that the end token falls inside an accepted block."""

        block_size = BLOCK_SIZE

        def cache_geometry(self):
            return 1, 1, 2

        def extend(self, store, rows, starts, counts, taps_BE, next_B):
            self.emitted = sum(counts) - len(PROMPTS[0]) + 1 if starts[0] == 0 else self.emitted + counts[0]

        def propose(self, store, rows, anchors, anchor_ids, carry, sampler, uniform):
            from dspark_exp.contracts import Proposal

            ahead = (plain + [0] * BLOCK_SIZE)[self.emitted : self.emitted + BLOCK_SIZE]
            tokens = torch.tensor([ahead])
            return Proposal(tokens, torch.nn.functional.one_hot(tokens, target.facts.vocab_size).float(), None)

    (generation,) = SpeculativeLoop(target, Oracle(), make_cache, Sampling(0.0)).run([Request(PROMPTS[0], 100, seed=0)])
    end = plain.index(stop)
    assert generation.token_ids == plain[: end + 1]
    assert generation.finish_reason == "stop"
    assert sum(r.emitted for r in generation.rounds) == end
    last = generation.rounds[-1]
    assert last.accepted <= last.verified <= BLOCK_SIZE
    assert last.emitted == (end - 1) % (BLOCK_SIZE + 1) + 1


def test_no_requests_give_no_generations(target: Target) -> None:
    assert _loop(target, "dflash").run([]) == []


def test_more_requests_than_rows_are_all_served_in_order(target: Target) -> None:
    requests = [Request(PROMPTS[i % 5], 3 + i % 7, seed=i) for i in range(23)]
    finished: list[int] = []
    generations = _loop(target, "eagle3", 1.0, batch_size=4).run(requests, lambda index, _: finished.append(index))
    assert sorted(finished) == list(range(23))
    for request, generation in zip(requests, generations, strict=True):
        assert len(generation.token_ids) <= request.max_new_tokens


def test_a_threshold_needs_a_confidence_head(target: Target) -> None:
    with pytest.raises(ConfigError, match="confidence head"):
        _loop(target, "dflash", policy=Threshold(0.5))


def test_a_fixed_length_must_fit_the_block(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"within 0\.\.4"):
        _loop(target, "dflash", policy=Fixed(5))


def test_top_k_of_one_is_greedy_at_any_temperature(target: Target) -> None:
    drafter = make_drafter("dspark_markov", target)
    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(1.0, top_k=1), batch_size=3)
    for prompt, generation in zip(PROMPTS, loop.run([Request(p, 10, seed=3) for p in PROMPTS]), strict=True):
        assert generation.token_ids == _plain_greedy(target, prompt, 10)


def test_a_confidence_head_works_without_a_markov_head(target: Target) -> None:
    torch.manual_seed(0)
    drafter = BlockDrafter(target.facts, target.head, 2, BLOCK_SIZE, head=None, confidence_head=True).eval()
    assert not drafter.confidence_reads_markov
    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(0.0), Threshold(0.45), batch_size=2)
    for prompt, generation in zip(PROMPTS, loop.run([Request(p, 10, seed=3) for p in PROMPTS]), strict=True):
        assert generation.token_ids == _plain_greedy(target, prompt, 10)
        assert all(len(r.confidence) == BLOCK_SIZE for r in generation.rounds)


class _Curves:
    """Capacity curves for the schedulers: one that falls smoothly, one with a cliff."""

    smooth = CapacityCurve(np.arange(1, 4000), 1.0 + 0.002 * np.arange(1, 4000))
    cliff = CapacityCurve(np.array([1, 64, 65, 4000]), np.array([1.0, 1.2, 2.5, 40.0]))


class _Retrospective:
    """Not a policy to use: an unconstrained search over this round's own confidences lets x_k decide about itself."""

    remembers = False

    def __init__(self, curve: CapacityCurve) -> None:
        self.curve = curve

    def needs_confidence(self, num_requests: int, block_size: int) -> bool:
        return True

    def check(self, block_size: int, has_confidence: bool) -> None: ...

    def start(self) -> None: ...

    def num_drafting(self, num_requests: int) -> int:
        return num_requests

    def lengths(self, confidence_RG: np.ndarray, num_requests: int, block_size: int) -> np.ndarray:
        survival = survivals(confidence_RG).astype(float)
        seconds = 1 / self.curve.steps_per_s(1 + np.arange(block_size + 1))
        theta = np.concatenate([np.ones((num_requests, 1)), 1 + survival.cumsum(1)], axis=1) / seconds
        return theta.argmax(1)


SCHEDULERS = {
    "prefix": lambda: PrefixScheduler(_Curves.smooth),
    "prefix_on_a_cliff": lambda: PrefixScheduler(_Curves.cliff),
    "async": lambda: AsyncScheduler(_Curves.cliff, staleness=2),
    "async_that_skips_drafts": lambda: AsyncScheduler(
        CapacityCurve(
            np.array([1]),
            np.array([1.0]),
            Rounds(np.array([1]), np.array([0, 4]), np.array([[2.0, 9.0]]), np.array([1.0])),
        ),
        1,
        probe_every=2,
    ),  # and drafts for one request at a time
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_real_loop_is_exact_under_every_scheduler(name: str) -> None:
    """Different prompts share the batch, so that admissions compete."""
    target = random_target(vocab_size=6, stop_ids=(99,))
    prompts, num_samples = [[2, 3, 4], [5, 1]], 4000
    loop = SpeculativeLoop(
        target,
        make_drafter("dspark_markov", target),
        make_cache,
        Sampling(1.0),
        SCHEDULERS[name](),
        batch_size=250,
        calibrate=Calibration((0.7, 1.3, 1.0, 2.0)).apply,
        early_exit=EarlyExit(0.5, window=1, pause=1) if name == "prefix" else None,
    )
    requests = [Request(prompts[s % 2], 4, seed=s) for s in range(2 * num_samples)]
    generations = loop.run(requests)
    for which, prompt in enumerate(prompts):
        joint = _pair_distribution(target, prompt)
        counts = torch.zeros_like(joint)
        for generation in generations[which::2]:
            counts[tuple(generation.token_ids[:3])] += 1
        assert _goodness_of_fit(counts, joint) > 1e-3
    rounds = [r for g in generations for r in g.rounds]
    assert len({r.verified for r in rounds}) > 1
    if name == "async_that_skips_drafts":
        assert 0 < sum(r.drafted == 0 for r in rounds) < len(rounds)


def test_greedy_tokens_are_the_same_under_every_scheduler_and_early_exit(target: Target) -> None:
    for make in SCHEDULERS.values():
        for kind in ("dspark_markov", "eagle3"):
            policy = make() if kind == "dspark_markov" else Fixed(2)
            loop = SpeculativeLoop(
                target,
                make_drafter(kind, target),
                make_cache,
                Sampling(0.0),
                policy,
                batch_size=3,
                early_exit=EarlyExit(2.0, window=1, pause=2),
            )
            generations = loop.run([Request(p, 14, seed=0) for p in PROMPTS])
            assert any(r.drafted == 0 for g in generations for r in g.rounds)
            for prompt, generation in zip(PROMPTS, generations, strict=True):
                assert generation.token_ids == _plain_greedy(target, prompt, 14)


def test_fixed_length_zero_drafts_nothing_and_is_plain_decoding(target: Target) -> None:
    generations = _loop(target, "dspark_markov", policy=Fixed(0)).run([Request(p, 9, seed=0) for p in PROMPTS])
    assert all(r.drafted == 0 and r.emitted == 1 for g in generations for r in g.rounds)
    assert [g.token_ids for g in generations] == [_plain_greedy(target, p, 9) for p in PROMPTS]


@pytest.mark.parametrize(
    ("policy", "confidences", "wanted_a"),
    [("retrospective", True, 0.85), ("early_stop", True, 0.7), ("async", True, 0.7), ("threshold", True, 0.7)],
)
def test_the_two_token_counterexample_of_the_appendix(policy: str, confidences: bool, wanted_a: float) -> None:
    """Exact: every draft and verdict enumerated. Vocabulary {A, B}, p_t = (0.7, 0.3), p_d = (0.5, 0.5)."""
    curve = CapacityCurve.of_steps_per_s([1, 2, 3], [1.0, 0.5, 0.45])
    policies = {
        "retrospective": _Retrospective(curve),
        "early_stop": PrefixScheduler(curve),
        "async": AsyncScheduler(curve, staleness=1),
        "threshold": Threshold(0.5),
    }
    chosen, probability_of_a = policies[policy], 0.0
    if policy == "async":
        chosen.lengths(np.array([[0.8, 0.9]]), 1, 2)  # an older round decides how many
    history = copy.deepcopy(chosen)
    for first in (0, 1):
        second_confidence = 0.9 if first == 0 else 0.0
        lengths = copy.deepcopy(history).lengths(np.array([[0.8, second_confidence]]), 1, 2)
        target_probs = [0.7, 0.3]
        if lengths[0] == 0:
            probability_of_a += 0.5 * target_probs[0]
            continue
        accept = min(1.0, target_probs[first] / 0.5)
        residual = [max(0.0, t - 0.5) for t in target_probs]
        resampled_a = residual[0] / sum(residual)
        probability_of_a += 0.5 * (accept * (first == 0) + (1 - accept) * resampled_a)
    assert probability_of_a == pytest.approx(wanted_a)


def test_features_do_not_pile_up_where_nothing_is_drafted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_MOST_UNHEARD", 6)
    batch = DecodingBatch(target, make_drafter("eagle3", target), make_cache, Sampling(0.0), Fixed(0), 2, 60)
    batch.enter([(i, Request(PROMPTS[i], 30, 0, ignore_stop=True)) for i in range(2)])
    for _ in range(20):
        batch.round()
        assert all(sum(len(run.following) for run in runs) <= 7 for runs in batch._unheard.values())
    batch.policy = Full()
    while not all(p.done for p in batch.active.values()):
        batch.round()
    endless = random_target(stop_ids=(99,))
    for progress in batch.active.values():
        wanted = _plain_greedy(endless, PROMPTS[progress.index], 30)
        assert progress.generation.token_ids == wanted


def test_where_some_draft_each_has_its_turn() -> None:
    rotation = Rotation()
    assert [rotation.choose(count, 3) for count in (2, 2, 1, 3, 0)] == [[0, 1], [0, 2], [1], [0, 1, 2], []]
    assert rotation.choose(1, 2) == [0]
