"""The real batched loop: equal to plain decoding, exact, independent of the batch, right at the ends."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare

from dspark_exp.decoding import Fixed, Full, Request, Sampling, SpeculativeLoop, Threshold
from dspark_exp.drafters import BlockDrafter
from dspark_exp.errors import ConfigError
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
    expected = joint.double() / joint.double().sum() * num_samples
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    assert chisquare(observed, wanted).pvalue > 1e-3
    if kind != "dflash":
        lengths = {r.verified for g in generations for r in g.rounds}
        assert lengths, "no round was decoded"


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
