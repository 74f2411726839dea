"""The simulator: worked cases by hand, and the limits that must hold."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_exp.decoding import EarlyExit, Fixed, Full
from dspark_exp.scheduling import AsyncScheduler, CapacityCurve, Rounds
from dspark_exp.serving import SimulatedRequest, simulate

FLAT = CapacityCurve(np.array([1.0, 1000.0]), np.array([1.0, 1.0]))


def _request(accepted: list[int], confidence: float = 0.9, prompt: int = 4) -> SimulatedRequest:
    return SimulatedRequest(prompt, np.full((len(accepted), 3), confidence), np.array(accepted))


def test_a_round_moves_by_accepted_tokens_and_one() -> None:
    """Positions 0 -> 3 (2 accepted), -> 4 (0 accepted), -> 7: three rounds and a prefill of one second each."""
    result = simulate([_request([2, 9, 9, 0, 2, 9, 9])], FLAT, Full(), num_rows=1, concurrency=1)
    (served,) = result.served
    assert (served.rounds, served.tokens) == (3, 8)
    assert result.seconds == pytest.approx(4.0)
    assert served.tokens_per_s == pytest.approx(7 / 3)
    cut = simulate([_request([2, 9, 9, 0, 2, 9, 9])], FLAT, Fixed(1), num_rows=1, concurrency=1)
    assert cut.served[0].rounds == 4  # 0 -> 2 -> 4? no: 0 -> 2, 2 -> 4, 4 -> 6, 6 -> 7


def test_plain_decoding_takes_a_round_a_token() -> None:
    result = simulate([_request([3] * 6)], FLAT, None, num_rows=1, concurrency=1)
    assert result.served[0].rounds == 6
    assert result.summary()["drafted_share"] == 0


def test_users_share_rounds_and_rows_are_a_limit() -> None:
    requests = [_request([0] * 5)] * 8
    together = simulate(requests, FLAT, Full(), num_rows=8, concurrency=8)
    in_turn = simulate(requests, FLAT, Full(), num_rows=2, concurrency=8)
    assert together.seconds == pytest.approx(6.0)
    assert in_turn.seconds == pytest.approx(4 * 6.0)


def test_open_loop_waits_for_arrivals() -> None:
    result = simulate([_request([0, 0])] * 2, FLAT, Full(), num_rows=4, arrivals=[0.0, 100.0])
    assert result.seconds == pytest.approx(103.0)
    assert result.busy_s == pytest.approx(6.0)
    assert [s.first_token_s for s in result.served] == pytest.approx([1.0, 1.0])


def test_costs_come_from_measured_rounds() -> None:
    rounds = Rounds(
        np.array([1.0, 2.0]), np.array([0.0, 3.0]), np.array([[2.0, 5.0], [3.0, 9.0]]), np.array([1.0, 1.5])
    )
    curve = CapacityCurve(np.array([1.0, 100.0]), np.array([0.5, 0.5]), rounds)
    drafted = simulate([_request([3, 3, 3, 3])] * 2, curve, Full(), num_rows=2, concurrency=2)
    assert drafted.seconds == pytest.approx(0.5 + 9.0)
    plain = simulate([_request([3, 3, 3, 3])] * 2, curve, None, num_rows=2, concurrency=2)
    assert plain.seconds == pytest.approx(0.5 + 4 * 1.5)


def test_early_exit_saves_drafts() -> None:
    hopeless = [_request([0] * 30)]
    always = simulate(hopeless, FLAT, Full(), num_rows=1, concurrency=1)
    pausing = simulate(hopeless, FLAT, Full(), num_rows=1, concurrency=1, early_exit=EarlyExit(0.5, window=2, pause=4))
    assert always.summary()["drafted_share"] == 1
    assert pausing.summary()["drafted_share"] < 0.6
    assert pausing.served[0].tokens == always.served[0].tokens


def test_calibration_reaches_the_policy() -> None:
    steep = CapacityCurve(np.arange(1.0, 40.0), 1 + 0.1 * np.arange(1.0, 40.0))
    scheduler = AsyncScheduler(steep, staleness=1)
    sure = simulate([_request([3] * 40, 0.999)], steep, scheduler, num_rows=1, concurrency=1)
    doubtful = simulate(
        [_request([3] * 40, 0.999)], steep, scheduler, num_rows=1, concurrency=1, calibrate=lambda c: c * 0.01
    )
    assert doubtful.summary()["verified_per_round"] < sure.summary()["verified_per_round"]


@pytest.mark.parametrize("users", [1, 4])
def test_a_drafter_that_promises_too_much_is_not_drafted_for_where_that_does_not_pay(users: int) -> None:
    """A drafted round costs 1.5 plain ones; three tokens are promised at 0.9 each, few are accepted."""
    rounds = Rounds(np.array([1.0, 4.0]), np.array([0.0, 3.0]), np.array([[1.5, 1.6]] * 2), np.array([1.0, 1.0]))
    curve = CapacityCurve(np.array([1.0, 100.0]), np.array([1.0, 1.0]), rounds)
    requests = [_request([0, 0, 1, 0] * 100) for _ in range(2 * users)]

    def throughput(policy: AsyncScheduler | None) -> float:
        return simulate(requests, curve, policy, num_rows=users, concurrency=users).throughput

    plain = throughput(None)
    assert throughput(AsyncScheduler(curve, feedback=False)) < 0.85 * plain
    assert throughput(AsyncScheduler(curve)) > 0.96 * plain


def test_what_confidences_are_worth_is_learned_both_ways() -> None:
    curve = CapacityCurve(np.array([1.0, 100.0]), np.array([1.0, 1.0]))
    for confidence, accepted in ((0.9, 0), (0.5, 2), (0.2, 3)):
        scheduler = AsyncScheduler(curve)
        simulate([_request([accepted] * 2000, confidence)], curve, scheduler, num_rows=1, concurrency=1)
        promised = confidence + confidence**2 + confidence**3
        assert scheduler._kept / scheduler._promised == pytest.approx(accepted / promised, rel=0.05, abs=0.05)
