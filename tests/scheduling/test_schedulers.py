"""Schedulers against brute force over every length vector, the paper's counterexample, and the clock."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from dspark_exp.errors import ConfigError
from dspark_exp.scheduling import (
    AsyncScheduler,
    CapacityCurve,
    PrefixScheduler,
    Rounds,
    greedy_prefix,
    prefix,
    rank,
    survivals,
)


def _smooth(length: int = 64, draft_s: float = 0.0) -> CapacityCurve:
    """Seconds rise linearly: tau * SPS(B) is unimodal along the greedy path."""
    tokens = np.arange(1, length)
    if not draft_s:
        return CapacityCurve(tokens, 1.0 + 0.3 * tokens)
    requests, lengths = np.array([1.0, 32.0]), np.array([0.0, 16.0])
    verify = 1.0 + 0.3 * requests[:, None] * (1 + lengths)
    return CapacityCurve(tokens, 1.0 + 0.3 * tokens, Rounds(requests, lengths, verify + draft_s, verify[:, 0]))


def _brute_force(survival: np.ndarray, curve: CapacityCurve) -> float:
    """The best expected throughput of all length vectors."""
    num_requests, size = survival.shape
    best = 0.0
    for lengths in itertools.product(range(size + 1), repeat=num_requests):
        tokens = num_requests + sum(survival[r, :length].sum() for r, length in enumerate(lengths))
        seconds = float(curve.round_s(num_requests, num_requests + sum(lengths)))
        best = max(best, tokens / seconds)
    return best


def _throughput(survival: np.ndarray, lengths: np.ndarray, curve: CapacityCurve) -> float:
    tokens = len(lengths) + sum(survival[r, :length].sum() for r, length in enumerate(lengths))
    return tokens / float(curve.round_s(len(lengths), len(lengths) + lengths.sum()))


@pytest.mark.parametrize("draft_s", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_optimal_on_a_unimodal_curve(seed: int, draft_s: float) -> None:
    generator = np.random.default_rng(seed)
    confidence = generator.uniform(0.05, 1, (3, 4))
    survival, curve = survivals(confidence).astype(float), _smooth(draft_s=draft_s)
    lengths = PrefixScheduler(curve).lengths(confidence, 3, 4)
    assert lengths.tolist() == greedy_prefix(survival, curve).tolist()
    assert _throughput(survival, lengths, curve) == pytest.approx(_brute_force(survival, curve), rel=1e-6)


def test_a_step_in_the_curve_traps_the_early_stop_and_not_the_asynchronous_search() -> None:
    """Up to 3 tokens are cheap, the fourth is dear, and from there on more tokens cost nothing."""
    curve = CapacityCurve.of_steps_per_s([1, 2, 3, 4, 5, 6, 7, 8], [10, 9, 8, 4.5, 4.5, 4.5, 4.5, 4.5])
    confidence = np.full((2, 3), 0.95)
    survival = survivals(confidence).astype(float)
    trapped = greedy_prefix(survival, curve)
    assert trapped.sum() == 1
    scheduler = AsyncScheduler(curve, staleness=1)
    scheduler.num_drafting(2)
    scheduler.lengths(confidence, 2, 3)  # the round whose confidences the next one goes by
    scheduler.num_drafting(2)
    free = scheduler.lengths(confidence, 2, 3)
    assert free.tolist() == [3, 3]
    assert _throughput(survival, free, curve) == pytest.approx(_brute_force(survival, curve))
    assert _throughput(survival, free, curve) > 1.2 * _throughput(survival, trapped, curve)


def test_the_paper_counterexample_numbers() -> None:
    """Appendix A: with early stopping x_1 is refused whatever it makes of c_2."""
    curve = CapacityCurve.of_steps_per_s([1, 2, 3], [1.0, 0.5, 0.45])
    for second in (0.9, 0.0):
        assert greedy_prefix(survivals(np.array([[0.8, second]])), curve).tolist() == [0]


def test_equal_survivals_are_admitted_in_order_of_position() -> None:
    ranking = rank(survivals(np.ones((3, 4))))
    for admitted in range(13):
        assert ranking.lengths(admitted, 3).sum() == admitted
    assert ranking.request.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert ranking.tokens.tolist() == list(range(3, 16))


@pytest.mark.parametrize("seed", range(5))
def test_an_admission_does_not_depend_on_later_positions(seed: int) -> None:
    """Changing c_j of a request never changes whether its positions before j are verified."""
    generator = np.random.default_rng(seed)
    confidence = generator.uniform(0.2, 1, (4, 5))
    older = generator.uniform(0.2, 1, (4, 5))
    curve = CapacityCurve(np.arange(1, 40), np.sort(generator.uniform(1, 6, 39)))

    def lengths(name: str, current: np.ndarray) -> np.ndarray:
        if name == "prefix":
            return PrefixScheduler(curve).lengths(current, 4, 5)
        scheduler = AsyncScheduler(curve, staleness=1)
        scheduler.lengths(older, 4, 5)
        return scheduler.lengths(current, 4, 5)

    for name, request, position in itertools.product(("prefix", "async"), range(4), range(5)):
        before = lengths(name, confidence)
        for value in (0.0, 0.5, 1.0):
            changed = confidence.copy()
            changed[request, position:] = value
            after = lengths(name, changed)
            assert min(before[request], position) == min(after[request], position)


def test_capacity_follows_confidences_as_old_as_it_says() -> None:
    curve = _smooth()
    high, low = np.full((4, 5), 0.99), np.full((4, 5), 0.02)
    scheduler = AsyncScheduler(curve, staleness=3, margin=0.0)
    seen = []
    for confidence in (high, low, low, low, low, high, high, high, high):
        scheduler.num_drafting(4)
        seen.append(int(scheduler.lengths(confidence, 4, 5).sum()))
    fresh = [int(greedy_prefix(survivals(c), curve).sum()) for c in (high, low)]
    assert seen[:4] == [20, fresh[0], fresh[0], fresh[0]]  # no history: everything; then by the first round
    assert seen[4:8] == [fresh[1]] * 4
    assert seen[8] == fresh[0]
    scheduler.start()
    assert scheduler.lengths(low, 4, 5).sum() == 20


def test_large_and_small_batches_are_ranked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = np.random.default_rng(0).choice([0.5, 0.9, 1.0], (40, 7))
    small = rank(survivals(confidence))
    monkeypatch.setattr(prefix, "_FEW", 0)
    large = rank(survivals(confidence))
    assert small.request.tolist() == large.request.tolist()
    assert small.tokens == pytest.approx(large.tokens)


def test_a_margin_prefers_whole_blocks_where_the_curve_hardly_tells_them_apart() -> None:
    flat = CapacityCurve(np.arange(1, 40), 1.0 + 0.23 * np.arange(1, 40))
    lengths = {}
    for margin in (0.0, 0.05):
        scheduler = AsyncScheduler(flat, staleness=1, margin=margin)
        for _ in range(3):
            scheduler.num_drafting(2)
            lengths[margin] = scheduler.lengths(np.array([[0.9, 0.8, 0.7]] * 2), 2, 3)
    assert lengths[0.0].sum() < lengths[0.05].sum() == 6


def test_capacity_follows_the_number_of_requests() -> None:
    scheduler = AsyncScheduler(_smooth(400), staleness=1, margin=0.0)
    confidence = np.full((8, 5), 0.9)
    scheduler.lengths(confidence, 8, 5)
    of_eight = scheduler.lengths(confidence, 8, 5)
    of_four = scheduler.lengths(confidence[:4], 4, 5)
    assert of_four.sum() == pytest.approx(of_eight.sum() / 2, abs=4)


def test_a_round_that_does_not_pay_is_not_drafted_but_probed_in_time() -> None:
    curve = _smooth(draft_s=3.0)
    scheduler = AsyncScheduler(curve, staleness=1, probe_every=10)
    assert scheduler.num_drafting(4) == 4
    scheduler.lengths(np.full((4, 5), 0.02), 4, 5)
    pauses = "".join(str(scheduler.num_drafting(4)) for _ in range(30))
    assert pauses == "010000100000000001000000000010"  # 1, 4, 10, 10 rounds without a draft: probe_every = 10
    for _ in range(100):
        if drafting := scheduler.num_drafting(4):
            scheduler.lengths(np.full((drafting, 5), 0.99), drafting, 5)
    assert all(scheduler.num_drafting(4) == 4 for _ in range(4))


def test_a_pause_ends_when_the_load_becomes_one_for_which_drafting_pays() -> None:
    rounds = Rounds(
        np.array([1.0, 16.0]), np.array([0.0, 5.0]), np.array([[1.1, 1.2], [9.0, 9.0]]), np.array([1.0, 1.0])
    )
    scheduler = AsyncScheduler(CapacityCurve(np.array([1.0, 96.0]), np.array([1.0, 1.0]), rounds), staleness=1)
    assert scheduler.num_drafting(16) == 16
    scheduler.lengths(np.full((16, 5), 0.6), 16, 5)
    paused = [scheduler.num_drafting(16) for _ in range(12)]
    assert paused == [0, 1, *[0] * 4, 1, *[0] * 5]
    assert scheduler.num_drafting(1) == 1


def test_where_whole_blocks_go_through_it_listens_rarely_and_still_notices_that_they_stop() -> None:
    rounds = Rounds(np.array([1.0, 4.0]), np.array([0.0, 3.0]), np.array([[1.5, 1.6]] * 2), np.array([1.0, 1.0]))
    scheduler = AsyncScheduler(CapacityCurve(np.array([1.0, 100.0]), np.array([1.0, 1.0]), rounds))

    def play(num_rounds: int, confidence: float, accepted: int) -> tuple[int, int]:
        drafted = heard = 0
        for _ in range(num_rounds):
            if not (drafting := scheduler.num_drafting(2)):
                continue
            drafted += drafting == 2
            seen = np.full((drafting, 3), confidence)
            asked = scheduler.needs_confidence(drafting, 3)
            lengths = scheduler.lengths(seen if asked else None, drafting, 3)
            if scheduler.remembers:
                heard += 1
                scheduler.observe(None if asked else seen, lengths, np.minimum(lengths, accepted))
        return drafted, heard

    drafted, heard = play(170, 0.95, 3)
    assert drafted == 170
    assert heard == scheduler.MEMORY + scheduler.staleness + 160 // 8
    assert play(800, 0.05, 0)[0] < 8 * scheduler.MEMORY + scheduler.staleness
    assert play(2000, 0.95, 3)[0] > 1000  # probes hear that drafting pays again


@pytest.mark.parametrize("staleness", [0, -1])
def test_capacity_from_this_rounds_confidences_is_refused(staleness: int) -> None:
    with pytest.raises(ConfigError, match="staleness"):
        AsyncScheduler(_smooth(), staleness)


def test_a_thousand_requests_are_scheduled_within_a_millisecond() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.3, 1, (1024, 15)).astype(np.float32)
    tokens = np.arange(1, 1024 * 16 + 1, 64)
    curve = CapacityCurve(tokens, 1e-2 + 1e-6 * tokens)
    scheduler = AsyncScheduler(curve, staleness=2)
    for work in (
        lambda: PrefixScheduler(curve).lengths(confidence, 1024, 15),
        lambda: scheduler.lengths(confidence, 1024, 15),
    ):
        times = []
        for _ in range(100):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        assert min(times) < 1e-3
