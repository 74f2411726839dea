"""The engine: nothing lost, nothing leaked, nobody harmed by another's failure."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from dspark_exp.decoding import DecodingBatch, EarlyExit, Full, Request, Sampling, SpeculativeLoop, VerificationPolicy
from dspark_exp.errors import ConfigError, DataError
from dspark_exp.scheduling import AsyncScheduler, CapacityCurve
from dspark_exp.serving import Arrivals, ClosedLoop, Engine, OpenLoop, QueueFull, Stopwatch, drive, serve_in_turns
from dspark_exp.serving.engine import num_entering
from dspark_exp.targets import Target
from tests.conftest import make_cache, make_drafter

MAX_LENGTH = 48


def _engine(
    target: Target,
    kind: str | None = "dspark_markov",
    policy: VerificationPolicy | None = None,
    rows: int = 4,
    temperature: float = 1.0,
    **options: Any,
) -> Engine:
    drafter = None if kind is None else make_drafter(kind, target)
    batch = DecodingBatch(target, drafter, make_cache, Sampling(temperature), policy or Full(), rows, MAX_LENGTH)
    return Engine(batch, **options)


def _requests(count: int) -> list[Request]:
    generator = random.Random(0)
    return [
        Request(
            [generator.randrange(2, 10) for _ in range(generator.randrange(1, 9))], generator.randrange(1, 20), seed=i
        )
        for i in range(count)
    ]


def _alone(target: Target, requests: list[Request], kind: str | None = "dspark_markov") -> list[list[int]]:
    drafter = None if kind is None else make_drafter(kind, target)
    return [
        g.token_ids for g in SpeculativeLoop(target, drafter, make_cache, Sampling(1.0), batch_size=1).run(requests)
    ]


@pytest.mark.parametrize("kind", [None, "dspark_markov", "eagle3"])
def test_every_request_gets_what_it_gets_alone(target: Target, kind: str | None) -> None:
    requests = _requests(17)
    engine = _engine(target, kind)
    streamed: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    tickets = [engine.submit(r, streamed[i].extend) for i, r in enumerate(requests)]
    while engine.step():
        pass
    assert [t.generation.token_ids for t in tickets] == _alone(target, requests, kind)
    assert list(streamed.values()) == [t.generation.token_ids for t in tickets]
    for ticket in tickets:
        assert ticket.status == "finished"
        assert ticket.submitted_at <= ticket.first_token_at <= ticket.finished_at
        assert ticket.time_to_first_token_s > 0
    assert engine.counts["tokens"] == sum(len(t.generation.token_ids) for t in tickets)
    rounds = [one for t in tickets for one in t.rounds]
    assert engine.counts["answer_rounds"] == len(rounds)
    assert engine.counts["accepted_tokens"] == sum(one.accepted for one in rounds)
    assert engine.counts["verified_tokens"] == sum(one.verified for one in rounds)
    assert engine.counts["drafted_tokens"] == sum(one.drafted for one in rounds)
    assert engine.waited_s == pytest.approx(sum(t.time_to_first_token_s for t in tickets))
    assert engine.num_running == engine.num_waiting == 0
    assert not engine.step()


def test_requests_that_cannot_be_served_are_refused_with_a_reason(target: Target) -> None:
    engine = _engine(target)
    with pytest.raises(DataError, match="prompt is empty"):
        engine.submit(Request([], 5, 0))
    with pytest.raises(DataError, match=r"needs 65 positions .* has 48"):
        engine.submit(Request([3] * 50, 10, 0))
    with pytest.raises(DataError, match="max_new_tokens=0"):
        engine.submit(Request([3], 0, 0))
    with pytest.raises(DataError, match="must lie within 0"):
        engine.submit(Request([3, target.facts.vocab_size], 5, 0))
    for seed in (-1, 2**63):
        with pytest.raises(DataError, match="expected a number from 0"):
            engine.submit(Request([3], 5, seed))
    assert engine.num_waiting == 0


def test_a_full_queue_says_so_and_recovers(target: Target) -> None:
    engine = _engine(target, max_queue=3)
    for request in _requests(3):
        engine.submit(request)
    with pytest.raises(QueueFull, match="3 requests wait"):
        engine.submit(Request([3], 5, 0))
    engine.step()
    engine.submit(Request([3], 5, 0))
    assert engine.counts["rejected"] == 1


def test_cancelling_frees_the_row_and_changes_no_other_output(target: Target) -> None:
    requests = [Request(r.prompt_ids, 25, r.seed, ignore_stop=True) for r in _requests(8)]
    engine = _engine(target)
    tickets = [engine.submit(r) for r in requests]
    engine.step()
    running, waiting = tickets[1], tickets[6]
    engine.cancel(running)
    engine.cancel(waiting)
    while engine.step():
        pass
    engine.cancel(tickets[0])  # what ended stays ended
    assert running.status == waiting.status == "cancelled"
    assert waiting.generation.token_ids == []
    alone = _alone(target, requests)
    for i, ticket in enumerate(tickets):
        if i not in (1, 6):
            assert ticket.generation.token_ids == alone[i]
    assert engine.num_running == 0


def test_a_failing_callback_ends_its_own_request_alone(target: Target) -> None:
    requests = _requests(6)
    engine = _engine(target)

    def fail(_: list[int]) -> None:
        raise ValueError("no reader")

    tickets = [engine.submit(r, fail if i == 2 else None) for i, r in enumerate(requests)]
    while engine.step():
        pass
    assert tickets[2].status == "failed"
    assert "no reader" in tickets[2].error
    alone = _alone(target, requests)
    assert [t.generation.token_ids for i, t in enumerate(tickets) if i != 2] == [
        a for i, a in enumerate(alone) if i != 2
    ]


def test_a_failing_round_fails_what_it_held_and_the_engine_goes_on(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _requests(6)
    engine = _engine(target, rows=2)
    tickets = [engine.submit(r) for r in requests]
    engine.step()
    verify, broken = engine._batch._verify, {"now": True}

    def broken_verify(*arguments: Any) -> Any:
        if broken.pop("now", False):
            raise RuntimeError("out of memory")
        return verify(*arguments)

    monkeypatch.setattr(engine._batch, "_verify", broken_verify)
    while engine.step():
        pass
    failed = [t for t in tickets if t.status == "failed"]
    assert failed
    assert all("out of memory" in t.error for t in failed)
    alone = _alone(target, requests)
    for i, ticket in enumerate(tickets):
        if ticket.status == "finished":
            assert ticket.generation.token_ids == alone[i]
    assert {t.status for t in tickets} == {"failed", "finished"}


def test_a_failing_prefill_fails_its_own_request_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(6)
    engine = _engine(target)
    enter, logits = engine._batch.enter, target.logits
    entering: list[int] = []

    def watched_enter(pairs: Any) -> None:
        entering[:] = [index for index, _ in pairs]
        try:
            enter(pairs)
        finally:
            entering.clear()

    def broken_logits(final: Any) -> Any:
        if 3 in entering:
            raise RuntimeError("out of memory")
        return logits(final)

    monkeypatch.setattr(engine._batch, "enter", watched_enter)
    monkeypatch.setattr(target, "logits", broken_logits)
    tickets = [engine.submit(requests[0])]
    engine.step()  # one is in flight when the others come
    tickets += [engine.submit(request) for request in requests[1:]]
    while engine.step():
        pass
    assert [t.status for t in tickets] == ["finished"] * 3 + ["failed"] + ["finished"] * 2
    assert "out of memory" in tickets[3].error
    alone = _alone(target, requests)
    assert [t.generation.token_ids for t in tickets if t is not tickets[3]] == alone[:3] + alone[4:]
    assert engine.num_running == 0


def test_a_finished_request_is_ended_by_its_caller(target: Target) -> None:
    engine = _engine(target)
    ticket = engine.submit(Request([3] * 4, 30, 0, ignore_stop=True))
    engine.step()
    engine.finish(ticket)
    engine.cancel(ticket)  # the first word counts
    assert not engine.step()
    assert (ticket.status, engine.counts["finished"], engine.counts["cancelled"]) == ("finished", 1, 0)
    assert engine.num_running == 0


def test_many_threads_submit_to_an_engine_in_its_own_thread(target: Target) -> None:
    requests = _requests(30)
    engine = _engine(target)
    engine.start()
    tickets: dict[int, Any] = {}

    def user(first: int) -> None:
        for i in range(first, 30, 5):
            tickets[i] = engine.submit(requests[i])
            assert tickets[i].ended.wait(60)

    threads = [threading.Thread(target=user, args=(k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = engine.submit(Request([3] * 4, 30, 0))
    engine.stop()
    assert late.ended.is_set()
    alone = _alone(target, requests)
    assert [tickets[i].generation.token_ids for i in range(30)] == alone


@pytest.mark.slow
def test_ten_thousand_requests_with_cancellations_and_bad_prompts(target: Target) -> None:
    """Nothing is lost, nothing leaks, and those that survive get what they get alone."""
    generator = random.Random(1)
    engine = _engine(target, kind="dflash", rows=64, max_queue=400, temperature=0.0)
    prompts = [[generator.randrange(2, 10) for _ in range(n)] for n in (1, 3, 4, 6)]
    drafter = make_drafter("dflash", target)
    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(0.0), batch_size=1)
    wanted = {(i, n): loop.run([Request(p, n, 0)])[0].token_ids for i, p in enumerate(prompts) for n in (1, 2, 5)}
    tickets: list[tuple[Any, tuple[int, int]]] = []
    refused = rejected = cancelled = number = 0
    while number < 10_000:
        for _ in range(generator.randrange(1, 160)):
            if number >= 10_000:
                break
            number += 1
            kind = generator.random()
            try:
                if kind < 0.05:
                    engine.submit(Request([], 5, 0))
                elif kind < 0.1:
                    engine.submit(Request([4] * MAX_LENGTH, 5, 0))
                else:
                    key = (generator.randrange(4), generator.choice((1, 2, 5)))
                    tickets.append((engine.submit(Request(prompts[key[0]], key[1], number)), key))
                    if generator.random() < 0.15:
                        engine.cancel(tickets[-1][0])
            except DataError:
                refused += 1
            except QueueFull:
                rejected += 1
        if tickets and generator.random() < 0.5:
            engine.cancel(generator.choice(tickets[-100:])[0])
        engine.step()
    while engine.step():
        pass
    for ticket, key in tickets:
        assert ticket.ended.is_set()
        assert ticket.status in ("finished", "cancelled")
        if ticket.status == "finished":
            assert ticket.generation.token_ids == wanted[key]
        cancelled += ticket.status == "cancelled"
    assert len(tickets) + refused + rejected == 10_000
    assert cancelled > 500
    counts = engine.counts
    assert counts["submitted"] == len(tickets) == counts["finished"] + counts["cancelled"]
    batch = engine._batch
    assert engine.num_running == engine.num_waiting == 0
    assert not batch.active
    assert not batch._unheard
    assert not engine._dismissed


def test_a_closed_loop_serves_everything(target: Target) -> None:
    requests = _requests(20)
    closed = drive(_engine(target), requests, concurrency=3)
    assert len(closed.served) == 20
    assert closed.throughput > 0
    summary = closed.summary()
    assert summary["tokens_per_round"] >= 1
    assert summary["drafted_share"] == 1


def test_an_open_loop_counts_waits_from_arrival_and_skips_idle_time(target: Target) -> None:
    """One row, rounds of 0.1 s by a clock that nothing else moves: every time can be worked out by hand."""
    clock = Stopwatch()
    clock.skip(1.0)
    engine = _engine(target, None, rows=1, clock=clock)
    run = engine._batch.round

    def timed_round() -> None:
        run()
        clock.skip(0.1)

    engine._batch.round = timed_round  # type: ignore[method-assign]
    requests = [Request([3, 4], 3, i, ignore_stop=True) for i in range(4)]  # one token at once, two rounds
    loop = OpenLoop(engine, requests, [0.0, 0.05, 10.0, 10.0], clock)
    (result,) = serve_in_turns([(loop, Stopwatch())], slice_s=100.0)
    assert [s.first_token_s for s in result.served] == pytest.approx([0.0, 0.15, 0.0, 0.2])
    assert result.seconds == pytest.approx(10.4)
    assert result.busy_s == pytest.approx(0.8)
    assert [s.tokens_per_s for s in result.served] == pytest.approx([10.0] * 4)
    summary = result.summary()
    assert summary["first_token_s_p90"] == pytest.approx(0.185)
    assert [t.generation.token_ids for t in loop._tickets] == _alone(target, requests, None)


def test_loops_in_turns_serve_what_they_serve_alone_and_count_their_own_time(target: Target) -> None:
    requests = _requests(12)

    def loop(pause_s: float) -> tuple[ClosedLoop, Stopwatch]:
        clock = Stopwatch()
        engine = _engine(target, clock=clock)
        run = engine._batch.round

        def slow_round() -> None:
            time.sleep(pause_s)
            run()

        engine._batch.round = slow_round  # type: ignore[method-assign]
        return ClosedLoop(engine, requests, 3, clock), clock

    alone = loop(0.0)
    serve_in_turns([alone], slice_s=100.0)
    loops = [loop(0.0), loop(0.02)]
    started = time.perf_counter()
    gaps: list[float] = []
    quick, slow = serve_in_turns(loops, slice_s=0.02, between=lambda: gaps.append(time.perf_counter()))
    total = time.perf_counter() - started
    assert len(gaps) > total / 0.2  # and what happens there takes time of no loop
    answers = [[ticket.generation.token_ids for ticket in one._tickets] for one, _ in (alone, *loops)]
    assert answers[1:] == [answers[0]] * 2
    assert slow.seconds - quick.seconds > 0.02 * max(s.rounds for s in slow.served)  # its pauses are its own
    assert quick.seconds + slow.seconds == pytest.approx(total, rel=0.1)
    for result in (quick, slow):
        assert all(0 < s.first_token_s <= result.seconds for s in result.served)


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_arrivals_keep_their_mean_rate(kind: str) -> None:
    times = Arrivals(50.0, kind, burst=8.0, spell_s=1.0).times(20_000, seed=0)
    assert (times[1:] >= times[:-1]).all()
    assert 20_000 / times[-1] == pytest.approx(50.0, rel=0.05)
    per_second = [int(((times >= s) & (times < s + 1)).sum()) for s in range(0, int(times[-1]) - 2, 2)]
    after = [int(((times >= s) & (times < s + 1)).sum()) for s in range(1, int(times[-1]) - 1, 2)]
    ratio = sum(after) / sum(per_second)
    assert ratio == pytest.approx(8.0 if kind == "bursty" else 1.0, rel=0.1)
    with pytest.raises(ConfigError):
        Arrivals(0.0)
    with pytest.raises(ConfigError):
        Arrivals(1.0, "weekly")


def test_a_scheduler_and_early_exit_work_in_the_engine(target: Target) -> None:
    curve = CapacityCurve.of_steps_per_s([1, 8, 64], [10, 8, 1])
    batch = DecodingBatch(
        target, make_drafter("dspark_markov", target), make_cache, Sampling(0.0), AsyncScheduler(curve), 4, MAX_LENGTH,
        early_exit=EarlyExit(1.0, window=1, pause=2),
    )  # fmt: skip
    requests = _requests(12)
    engine = Engine(batch)
    tickets = [engine.submit(r) for r in requests]
    while engine.step():
        pass
    loop = SpeculativeLoop(target, None, make_cache, Sampling(0.0), batch_size=1)
    assert [t.generation.token_ids for t in tickets] == [g.token_ids for g in loop.run(requests)]
    assert {r.drafted > 0 for t in tickets for r in t.rounds} == {True, False}


def test_who_enters_fits_rows_and_prefill_limit_and_one_always_may() -> None:
    for prompts, num_free, count in (
        ([5, 5, 5], 3, 2),
        ([5, 5, 5], 1, 1),
        ([5, 5, 5], 0, 0),
        ([50, 1], 2, 1),
        ([1, 50, 1], 3, 1),
        ([10, 1], 2, 1),
        ([], 2, 0),
    ):
        assert num_entering(prompts, num_free, max_prefill_tokens=10) == count, prompts
