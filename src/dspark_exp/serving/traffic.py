"""Load on an engine: so many users at a time, or arrivals on a clock; and what came of it.

In: requests. Out: throughput, speed of each user, rounds. Closed loop: ``concurrency`` users, each sends its next
request when the last has ended. Open loop: arrivals at given times, whatever the engine does.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_exp.decoding import Request
from dspark_exp.errors import ConfigError
from dspark_exp.serving.engine import Engine, Ticket

Clock = Callable[[], float]


@dataclass(frozen=True)
class Arrivals:
    """When requests of an open loop arrive.

    Args:
        rate: requests a second on average.
        kind: ``poisson``, or ``bursty``: quiet and busy spells of ``spell_s`` seconds, the busy ones ``burst`` times
            the quiet ones' rate.

    Raises:
        ConfigError: unknown kind, or a rate or spell that is not above 0.
    """

    rate: float
    kind: str = "poisson"
    burst: float = 8.0
    spell_s: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in ("poisson", "bursty") or min(self.rate, self.spell_s) <= 0 or self.burst < 1:
            raise ConfigError(
                f"load: arrivals {self.kind!r} at {self.rate}/s with spells of {self.spell_s} s and burst "
                f"{self.burst}: kind is poisson or bursty, rate and spell above 0, burst at least 1."
            )

    def times(self, count: int, seed: int) -> np.ndarray:
        """[count] seconds from the start, rising. The mean rate of a bursty stream is ``rate`` as well."""
        generator = np.random.default_rng(seed)
        if self.kind == "poisson":
            return generator.exponential(1 / self.rate, count).cumsum()
        quiet = 2 * self.rate / (1 + self.burst)
        work = generator.exponential(1.0, count).cumsum()  # in expected arrivals; turned into time spell by spell
        per_pair = (quiet + quiet * self.burst) * self.spell_s
        pairs, rest = np.divmod(work, per_pair)
        in_quiet = quiet * self.spell_s
        inside = np.where(rest < in_quiet, rest / quiet, self.spell_s + (rest - in_quiet) / (quiet * self.burst))
        return pairs * 2 * self.spell_s + inside


@dataclass(frozen=True)
class Served:
    """One request as its user saw it."""

    tokens: int
    rounds: int
    verified: int
    drafted_rounds: int
    first_token_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class LoadResult:
    """A load test: everything that was served in ``seconds``, of which the engine worked ``busy_s``."""

    seconds: float
    served: list[Served]
    busy_s: float

    @property
    def throughput(self) -> float:
        """Tokens a second, all users together."""
        return sum(s.tokens for s in self.served) / max(self.seconds, 1e-9)

    def summary(self) -> dict[str, Any]:
        """Figures of the test; speeds of users as median and 10 % quantile, their waits as median and 90 %."""
        speeds = [s.tokens_per_s for s in self.served if s.tokens > 1]
        waits = [s.first_token_s for s in self.served]
        rounds = sum(s.rounds for s in self.served)
        return {
            "requests": len(self.served),
            "tokens": sum(s.tokens for s in self.served),
            "seconds": self.seconds,
            "throughput": self.throughput,
            "tokens_per_s_per_user": statistics.median(speeds) if speeds else 0.0,
            "tokens_per_s_per_user_p10": float(np.quantile(speeds, 0.1)) if speeds else 0.0,
            "first_token_s": statistics.median(waits) if waits else 0.0,
            "first_token_s_p90": float(np.quantile(waits, 0.9)) if waits else 0.0,
            "verified_per_round": sum(s.verified for s in self.served) / max(1, rounds),
            "drafted_share": sum(s.drafted_rounds for s in self.served) / max(1, rounds),
            "tokens_per_round": sum(s.tokens for s in self.served) / max(1, rounds),
        }


class Stopwatch:
    """A clock that runs while it is entered. Seconds."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, math.nan

    def __call__(self) -> float:
        return self._total if math.isnan(self._since) else self._total + time.perf_counter() - self._since

    def skip(self, seconds: float) -> None:
        """Go forward at once."""
        self._total += seconds

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._total, self._since = self(), math.nan


class ClosedLoop:
    """Users of an engine, each of whom sends the next request when the last has ended; one step at a time.

    Args:
        engine: without requests. It must go by the same clock.
        requests: of all users. concurrency: users at most.
        clock: stands still while something else has the machine.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], concurrency: int, clock: Clock) -> None:
        self._engine, self._waiting, self._clock = engine, list(requests)[::-1], clock
        self._users = min(concurrency, len(requests))
        self._total = sum(r.max_new_tokens for r in requests)
        self._started, self._tokens_before = clock(), engine.counts["tokens"]
        self._tickets: list[Ticket] = []

    @property
    def progress(self) -> float:
        """From 0 to 1, which is not reached where answers end before their limit."""
        return (self._engine.counts["tokens"] - self._tokens_before) / max(1, self._total)

    def step(self) -> bool:
        """Requests in, one round. False = everything has ended."""
        engine = self._engine
        in_flight = engine.num_running + engine.num_waiting
        for _ in range(min(len(self._waiting), self._users - in_flight)):
            self._tickets.append(engine.submit(self._waiting.pop()))
        return engine.step()

    def result(self) -> LoadResult:
        """After the last step."""
        seconds = self._clock() - self._started
        return LoadResult(seconds, [_served(ticket) for ticket in self._tickets], seconds)


class OpenLoop:
    """Requests that arrive at given times, whatever the engine does; one step at a time.

    Time in which nothing is in flight is skipped, not waited for. Users wait from their arrival on.

    Args:
        engine: without requests. It must go by the same clock.
        arrivals: seconds from now of each request, rising.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], arrivals: Sequence[float], clock: Stopwatch
    ) -> None:
        self._engine, self._clock, self._started = engine, clock, clock()
        self._arrivals = [self._started + float(seconds) for seconds in arrivals]
        self._waiting = list(zip(self._arrivals, requests, strict=True))[::-1]
        self._total = sum(r.max_new_tokens for r in requests)
        self._tokens_before, self._idle_s = engine.counts["tokens"], 0.0
        self._tickets: list[Ticket] = []

    @property
    def progress(self) -> float:
        """From 0 to 1, which is not reached where answers end before their limit."""
        return (self._engine.counts["tokens"] - self._tokens_before) / max(1, self._total)

    def step(self) -> bool:
        """Who has arrived goes in, one round. False = everything has ended."""
        while self._waiting and self._waiting[-1][0] <= self._clock():
            self._tickets.append(self._engine.submit(self._waiting.pop()[1]))
        if self._engine.step():
            return True
        if self._waiting:
            idle = max(0.0, self._waiting[-1][0] - self._clock())
            self._clock.skip(idle)
            self._idle_s += idle
        return bool(self._waiting)

    def result(self) -> LoadResult:
        """After the last step."""
        seconds = self._clock() - self._started
        served = [_served(ticket, at) for ticket, at in zip(self._tickets, self._arrivals, strict=True)]
        return LoadResult(seconds, served, seconds - self._idle_s)


def serve_in_turns(
    loops: Sequence[tuple[ClosedLoop | OpenLoop, Stopwatch]],
    slice_s: float,
    between: Callable[[], None] = lambda: None,
) -> list[LoadResult]:
    """Loops on a machine whose speed drifts: the one that is least far gets the next ``slice_s`` seconds.

    Each result holds the loop's own time alone. ``between`` is called before every slice.
    """
    results: dict[int, LoadResult] = {}
    while len(results) < len(loops):
        place = min((i for i in range(len(loops)) if i not in results), key=lambda i: loops[i][0].progress)
        loop, clock = loops[place]
        between()
        with clock:
            until, goes_on = clock() + slice_s, True
            while goes_on and clock() < until:
                goes_on = loop.step()
            if not goes_on:
                results[place] = loop.result()
    return [results[place] for place in range(len(loops))]


def drive(engine: Engine, requests: Sequence[Request], concurrency: int) -> LoadResult:
    """Serve all requests in a closed loop of so many users, stepping the engine in this thread."""
    loop = ClosedLoop(engine, requests, concurrency, time.perf_counter)
    while loop.step():
        pass
    return loop.result()


def _served(ticket: Ticket, arrived_at: float | None = None) -> Served:
    waited_s = ticket.time_to_first_token_s if arrived_at is None else ticket.first_token_at - arrived_at
    return Served(
        tokens=len(ticket.generation.token_ids),
        rounds=len(ticket.rounds),
        verified=sum(r.verified for r in ticket.rounds),
        drafted_rounds=sum(r.drafted > 0 for r in ticket.rounds),
        first_token_s=waited_s,
        tokens_per_s=ticket.tokens_per_s,
    )
