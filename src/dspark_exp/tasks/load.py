"""Recipes about load: the engine under more and more users, by verification policy.

``pareto``: throughput against speed of each user. ``load_adaptive``: verified tokens against load. ``staleness``: what
old confidences cost. ``early_exit``: whether pausing hopeless drafts pays. All on the real engine; staleness on the
simulator, which ``pareto`` compares with the engine.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_exp.calibration import Calibration
from dspark_exp.data.benchmarks import Prompt
from dspark_exp.decoding import (
    EarlyExit,
    Full,
    Request,
    Threshold,
    VerificationPolicy,
    check_policy,
    positions_needed,
)
from dspark_exp.errors import ConfigError
from dspark_exp.reports.load import write_early_exit, write_load_adaptive, write_pareto, write_staleness
from dspark_exp.scheduling import AsyncScheduler, CapacityCurve, PrefixScheduler
from dspark_exp.serving import (
    Arrivals,
    ClosedLoop,
    Engine,
    LoadResult,
    OpenLoop,
    SimulatedRequest,
    Stopwatch,
    drive,
    serve_in_turns,
    simulate,
)
from dspark_exp.targets import Target
from dspark_exp.tasks.building import build_batch, build_sampling, load_benchmarks, open_target
from dspark_exp.tasks.evaluate import requests_of
from dspark_exp.tasks.profile_capacity import measured_capacity
from dspark_exp.tasks.provenance import experiment_header, report_folder
from dspark_exp.tasks.recording import SIMULATED_PER_BENCHMARK, recorded_outcomes
from dspark_exp.tasks.round_times import RoundTimer, prompts_for_rounds
from dspark_exp.tasks.train_eval import Job
from dspark_exp.tasks.trained import Trained, trained_drafter, with_drafter

log = logging.getLogger(__name__)
ARMS = ("plain", "mtp1", "fixed", "threshold", "prefix_scheduler", "async_scheduler")
STALENESS = (1, 2, 3, 4, 6, 8)
_GOLDEN = (5**0.5 - 1) / 2
_EXITS = (0.25, 0.5, 1.0)  # accepted draft tokens a round below which a request pauses


@dataclass(frozen=True)
class Arm:
    """One way of serving. No policy = plain decoding without a drafter."""

    name: str
    trained: Trained | None
    make_policy: Callable[[], VerificationPolicy] | None
    early_exit: EarlyExit | None = None

    @property
    def drafter(self) -> Any:
        return self.trained.drafter if self.trained is not None else None

    @property
    def calibration(self) -> Calibration | None:
        return self.trained.calibration if self.trained is not None else None


class Gauge:
    """How much slower rounds are than the capacity table says, timed in the gaps of a load test.

    Args:
        timer: of rounds of as many requests as the test has users.
        expected_s: seconds of each of its lengths by the table.
    """

    SHARE = 0.2  # of the time that has passed, at most, but for the first turns

    def __init__(self, timer: RoundTimer, expected_s: Sequence[float]) -> None:
        self._timer, self._expected_s = timer, expected_s
        timer.turn()  # warms up
        self._began, self._own_s = time.perf_counter(), 0.0

    def work(self) -> None:
        """A turn, if one is due."""
        started = time.perf_counter()
        if self._own_s <= self.SHARE * (started - self._began):
            self._timer.turn()
            self._own_s += time.perf_counter() - started

    @property
    def drift(self) -> float:
        """Seconds now over seconds then, the median over lengths. After ``work``."""
        return statistics.median(now / then for now, then in zip(self._timer.means(), self._expected_s, strict=True))


@dataclass(frozen=True)
class Bench:
    """What all load tests of one experiment share."""

    job: Job
    target: Target
    trained: Trained
    curve: CapacityCurve
    prompts: dict[str, list[Prompt]]

    @staticmethod
    def of(job: Job) -> Bench:
        target = open_target(job.config)
        trained = trained_drafter(job, target)
        few = {name: prompts[:SIMULATED_PER_BENCHMARK] for name, prompts in load_benchmarks(job.config).items()}
        return Bench(job, target, trained, measured_capacity(job, target).curve(), few)

    def arm(self, name: str) -> Arm:
        """An arm by name.

        Raises:
            ConfigError: unknown, or a policy that the drafter cannot serve.
        """
        policies: dict[str, Callable[[], VerificationPolicy]] = {
            "fixed": Full,
            "threshold": lambda: Threshold(self.job.config.load.threshold),
            "prefix_scheduler": lambda: PrefixScheduler(self.curve),
            "async_scheduler": lambda: AsyncScheduler(self.curve),
        }
        if name == "plain":
            return Arm(name, None, None)
        if name == "mtp1":
            return Arm(name, trained_drafter(with_drafter(self.job, "mtp1"), self.target), Full)
        if name not in policies:
            raise ConfigError(f"load.arms holds {name!r}; choose from {', '.join(ARMS)}.")
        check_policy(policies[name](), self.trained.drafter)
        return Arm(name, self.trained, policies[name])

    def requests(self, concurrency: int) -> list[Request]:
        """The same prompts for every arm, benchmarks in turn, each time with another seed."""
        by_name = [requests_of(self.job.config, self.target, prompts) for prompts in self.prompts.values()]
        mixed = [r for group in zip(*by_name, strict=False) for r in group]
        return [
            Request(r.prompt_ids, answer_limit(i, r.max_new_tokens), r.seed + 1009 * (i // len(mixed)))
            for i, r in ((i, mixed[i % len(mixed)]) for i in range(self.num_requests(concurrency)))
        ]

    def num_requests(self, concurrency: int) -> int:
        wanted = self.job.config.load
        return max(wanted.min_requests, wanted.requests_per_user * concurrency)

    def serve(
        self,
        arms: Sequence[Arm],
        concurrency: int,
        requests: Sequence[Request],
        gauge: Gauge | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> list[LoadResult]:
        """A load test of every arm, in turns of ``load.slice_s`` seconds; null: one arm after the other.

        A closed loop of ``concurrency`` users, or, with ``arrivals``, an open one into as many rows.
        """
        slice_s = self.job.config.load.slice_s
        between = gauge.work if gauge is not None else lambda: None
        if slice_s is not None:
            loops = [self._loop(arm, concurrency, requests, arrivals) for arm in arms]
            return serve_in_turns(loops, slice_s, between)
        return [serve_in_turns([self._loop(arm, concurrency, requests, arrivals)], 1.0, between)[0] for arm in arms]

    def _loop(
        self, arm: Arm, concurrency: int, requests: Sequence[Request], arrivals: Sequence[float] | None
    ) -> tuple[ClosedLoop | OpenLoop, Stopwatch]:
        """On a fresh engine, after two requests that warm it up and tell schedulers what drafts bring."""
        block = arm.drafter.block_size if arm.drafter is not None else 0
        batch = build_batch(
            self.target,
            arm.drafter,
            build_sampling(self.job.config.evaluation.sampling),
            arm.make_policy() if arm.make_policy is not None else Full(),
            concurrency,
            max(positions_needed(r, block) for r in requests),
            arm.calibration,
            arm.early_exit,
        )
        clock = Stopwatch()
        engine = Engine(batch, max_queue=len(requests), clock=clock)
        warm_up = [Request(r.prompt_ids, min(24, r.max_new_tokens), r.seed) for r in requests[:2]]
        drive(engine, warm_up, concurrency=2)
        if arrivals is not None:
            return OpenLoop(engine, requests, arrivals, clock), clock
        return ClosedLoop(engine, requests, concurrency, clock), clock

    def gauge(self, concurrency: int) -> Gauge | None:
        """Times rounds of so many requests; None where the capacity table holds no rounds of this drafter."""
        rounds = self.curve.rounds
        size = self.trained.drafter.block_size
        if rounds is None or size + 1 != len(rounds.lengths):
            return None
        lengths = sorted({-1, 0, size // 2, size})
        batches = [concurrency * (1 + length) for length in lengths[1:]]
        expected = [self.curve.plain_s(concurrency), *self.curve.round_s(concurrency, batches).tolist()]
        prompts = prompts_for_rounds(self.job.config, self.target, concurrency)
        sampling = build_sampling(self.job.config.evaluation.sampling)
        return Gauge(RoundTimer(self.target, self.trained.drafter, sampling, prompts, lengths), expected)

    def simulated(self, arm: Arm, concurrency: int, answers: list[SimulatedRequest]) -> float:
        """Throughput of the same load in the simulator, on the capacity table as it is."""
        result = simulate(
            [self._cut(answers[i % len(answers)], i) for i in range(self.num_requests(concurrency))],
            self.curve,
            arm.make_policy() if arm.make_policy is not None else None,
            num_rows=concurrency,
            concurrency=concurrency,
            calibrate=arm.calibration.apply if arm.calibration is not None else None,
            early_exit=arm.early_exit,
        )
        return result.throughput

    def _cut(self, answer: SimulatedRequest, index: int) -> SimulatedRequest:
        """As ``requests`` limits it."""
        limit = answer_limit(index, self.job.config.benchmark.max_new_tokens) - 1  # the last token is no anchor
        return SimulatedRequest(answer.prompt_tokens, answer.confidence[:limit], answer.accepted[:limit])

    def answers(self) -> list[SimulatedRequest]:
        """Recorded outcomes, benchmarks in turn as in ``requests``."""
        found = recorded_outcomes(self.job.config, self.target, self.trained.drafter, self.prompts)
        return [r for group in zip(*found.values(), strict=False) for r in group]

    def measure(self, arms: Sequence[Arm], with_drift: bool = False) -> list[dict[str, Any]]:
        """Every arm at every concurrency, repeated in turn; medians and ranges. ``with_drift``: see ``Gauge``."""
        rows = []
        for concurrency in self.job.config.load.concurrency:
            requests = self.requests(concurrency)
            summaries: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
            gauge = self.gauge(concurrency) if with_drift else None
            for turn in range(self.job.config.load.repeats):
                order = [arms[(place + turn) % len(arms)] for place in range(len(arms))]  # another one goes first
                for arm, result in zip(order, self.serve(order, concurrency, requests, gauge), strict=True):
                    summaries[arm.name].append(result.summary())
            common = {"concurrency": concurrency} | ({"drift": gauge.drift} if gauge is not None else {})
            rows += [{"arm": name, **common, **median_of(runs)} for name, runs in summaries.items()]
            shown = ", ".join(f"{name} {median_of(runs)['throughput']:.0f}" for name, runs in summaries.items())
            log.info("%d users, tokens/s: %s", concurrency, shown)
        return rows

    def header(self) -> dict[str, Any]:
        return experiment_header(self.job.config, self.target, self.trained.source)

    @property
    def folder(self) -> Path:
        return report_folder(self.job.config)


def answer_limit(index: int, max_new_tokens: int) -> int:
    """New tokens of the index-th request of a load test: from half of the limit to all of it, evenly spread.

    Answers of one length would keep requests in step where every round gives one token, and nowhere else.
    """
    share = 0.5 + 0.5 * ((index * _GOLDEN) % 1)
    return max(2, math.ceil(share * max_new_tokens))


def run_pareto(job: Job) -> Path:
    """Throughput against tokens per second of each user, all arms, and how close the simulator comes."""
    bench = Bench.of(job)
    arms = [bench.arm(name) for name in job.config.load.arms]
    rows = bench.measure(arms, with_drift=True)
    write_pareto(bench.folder, bench.header() | {"rows": rows})  # what was measured is kept, whatever comes next
    answers = bench.answers()
    for row in rows:
        arm = next(a for a in arms if a.name == row["arm"])
        known = arm.name != "mtp1"  # its outcomes are another drafter's
        row["simulated"] = bench.simulated(arm, row["concurrency"], answers) / row.get("drift", 1.0) if known else None
    return write_pareto(bench.folder, bench.header() | {"rows": rows})


def run_load_adaptive(job: Job) -> Path:
    """Throughput and verified tokens a request against the number of users."""
    bench = Bench.of(job)
    arms = [bench.arm(name) for name in ("plain", "fixed", "prefix_scheduler", "async_scheduler")]
    return write_load_adaptive(bench.folder, bench.header() | {"rows": bench.measure(arms)})


def run_early_exit(job: Job) -> Path:
    """Whole blocks and the asynchronous scheduler, with requests pausing whose drafts keep failing, and without."""
    bench = Bench.of(job)
    base = [bench.arm(name) for name in ("plain", "fixed", "async_scheduler")]
    arms = base + [
        Arm(f"{arm.name}, exit below {limit:g}", arm.trained, arm.make_policy, EarlyExit(limit))
        for arm in base[1:]
        for limit in _EXITS
    ]
    return write_early_exit(bench.folder, bench.header() | {"rows": bench.measure(arms)})


def run_staleness(job: Job) -> Path:
    """Simulated throughput of the asynchronous scheduler by the age of its confidences, steady and bursty load."""
    bench = Bench.of(job)
    answers, arm = bench.answers(), bench.arm("async_scheduler")
    rows = []
    capacity = max(job.config.load.concurrency)
    ceiling = bench.simulated(arm, capacity, answers) / statistics.mean(a.num_tokens for a in answers)
    for load, rate in (("steady", 0.5), ("steady", 0.9), ("bursty", 0.5), ("bursty", 0.9)):
        kind = "poisson" if load == "steady" else "bursty"
        count = 40 * capacity
        arrivals = Arrivals(rate * ceiling, kind, spell_s=count / ceiling / 20).times(count, seed=0)
        for staleness in STALENESS:
            result = simulate(
                [answers[i % len(answers)] for i in range(count)],
                bench.curve,
                AsyncScheduler(bench.curve, staleness),
                num_rows=capacity,
                arrivals=arrivals.tolist(),
                calibrate=arm.calibration.apply if arm.calibration is not None else None,
            )
            busy = sum(s.tokens for s in result.served) / max(result.busy_s, 1e-9)
            rows.append(
                {"load": load, "rate": rate, "staleness": staleness, "busy_throughput": busy, **result.summary()}
            )
    return write_staleness(bench.folder, bench.header() | {"rows": rows})


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeated runs, and what each run's throughput was."""
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    throughput = [run["throughput"] for run in runs]
    spread = {"throughput_low": min(throughput), "throughput_high": max(throughput)}
    return {**middle, **spread, "runs": throughput}
