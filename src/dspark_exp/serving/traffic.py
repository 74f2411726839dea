"""Load on an engine: so many users at a time, or arrivals on a clock; and what came of it.

In: requests. Out: throughput, speed of each user, rounds. Closed loop: ``concurrency`` users, each sends its next
request when the last has ended. Open loop: arrivals at given times, whatever the engine does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_exp.decoding import Request
from dspark_exp.errors import ConfigError
from dspark_exp.serving.engine import Engine, Ticket


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


@dataclass
class FullLoad:
    """The part of a closed loop that throughput is counted over: all users are there, and not all of them just came.

    From the end of the first answer until a user has no next request. The start, when all prompts come at once, and
    the end, when the last answers run out one by one, weigh differently on arms that keep requests in step and on those
    that do not. Of an open loop (no users), or without two requests a user: the whole test.
    """

    users: int
    num_requests: int
    _start: tuple[float, int] | None = None
    _end: tuple[float, int] | None = None

    def look(self, num_ended: int, seconds: float, tokens: int) -> None:
        """After every round: answers that ended until now, seconds and tokens since the start of the test."""
        if self._start is None and num_ended:
            self._start = seconds, tokens
        if self._end is None and self.num_requests - num_ended < self.users:
            self._end = seconds, tokens

    def measured(self, seconds: float, tokens: int) -> tuple[float, int]:
        """Seconds and tokens of that part, given those of the whole test."""
        if not self.users or self.num_requests < 2 * self.users or self._start is None or self._end is None:
            return seconds, tokens
        return self._end[0] - self._start[0], self._end[1] - self._start[1]


@dataclass(frozen=True)
class LoadResult:
    """A load test: everything that was served in ``seconds``, of which the engine worked ``busy_s``.

    Attributes:
        loaded_s, loaded_tokens: see ``FullLoad``.
    """

    seconds: float
    served: list[Served]
    busy_s: float
    loaded_s: float
    loaded_tokens: int

    @property
    def throughput(self) -> float:
        """Tokens a second, all users together, while all of them are there."""
        return self.loaded_tokens / max(self.loaded_s, 1e-9)

    def summary(self) -> dict[str, Any]:
        """Figures of the test; speeds of users as median and 10 % quantile."""
        speeds = [s.tokens_per_s for s in self.served if s.tokens > 1]
        rounds = sum(s.rounds for s in self.served)
        return {
            "requests": len(self.served),
            "seconds": self.seconds,
            "throughput": self.throughput,
            "tokens_per_s_per_user": statistics.median(speeds) if speeds else 0.0,
            "tokens_per_s_per_user_p10": float(np.quantile(speeds, 0.1)) if speeds else 0.0,
            "first_token_s": statistics.median([s.first_token_s for s in self.served]) if self.served else 0.0,
            "verified_per_round": sum(s.verified for s in self.served) / max(1, rounds),
            "drafted_share": sum(s.drafted_rounds for s in self.served) / max(1, rounds),
            "tokens_per_round": sum(s.tokens for s in self.served) / max(1, rounds),
        }


def drive(
    engine: Engine, requests: Sequence[Request], concurrency: int | None = None, arrivals: Sequence[float] | None = None
) -> LoadResult:
    """Serve all requests, stepping the engine in this thread.

    Args:
        concurrency: users of a closed loop; with ``arrivals`` (seconds from now of each request) an open loop instead.

    Raises:
        ConfigError: neither or both.
    """
    if (concurrency is None) == (arrivals is None):
        raise ConfigError("A load test needs either a concurrency or arrival times.")
    waiting = list(requests)[::-1]
    users = 0 if concurrency is None else min(concurrency, len(waiting))
    load, tokens_before = FullLoad(users, len(waiting)), engine.counts["tokens"]
    times = None if arrivals is None else [float(t) for t in arrivals][::-1]
    tickets: list[Ticket] = []
    started, idle = time.perf_counter(), 0.0
    while True:
        if times is None:
            in_flight = engine.num_running + engine.num_waiting
            load.look(len(tickets) - in_flight, time.perf_counter() - started, engine.counts["tokens"] - tokens_before)
            while waiting and engine.num_running + engine.num_waiting < users:
                tickets.append(engine.submit(waiting.pop()))
        else:
            while waiting and time.perf_counter() - started >= times[-1]:
                times.pop()
                tickets.append(engine.submit(waiting.pop()))
        if not engine.step():
            if not waiting:
                break
            if times:
                pause = max(0.0, min(0.01, times[-1] - (time.perf_counter() - started)))
                time.sleep(pause)
                idle += pause
    seconds = time.perf_counter() - started
    loaded = load.measured(seconds, engine.counts["tokens"] - tokens_before)
    return LoadResult(seconds, [_served(ticket) for ticket in tickets], seconds - idle, *loaded)


def _served(ticket: Ticket) -> Served:
    return Served(
        tokens=len(ticket.generation.token_ids),
        rounds=len(ticket.rounds),
        verified=sum(r.verified for r in ticket.rounds),
        drafted_rounds=sum(r.drafted > 0 for r in ticket.rounds),
        first_token_s=ticket.time_to_first_token_s,
        tokens_per_s=ticket.tokens_per_s,
    )
