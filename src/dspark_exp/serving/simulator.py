"""The engine without models: recorded outcomes and a capacity curve in place of forward passes.

In: for each request, what a draft from each position of its answer would have achieved; a capacity curve; a policy.
Out: the same figures as a load test. Policies are the very objects that the engine uses. Valid where its throughput
agrees with the real engine's on the machine whose curve it takes; then it speaks for curves of other machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from dspark_exp.decoding import EarlyExit, Rotation, Round, VerificationPolicy
from dspark_exp.scheduling import CapacityCurve
from dspark_exp.serving.engine import MAX_PREFILL_TOKENS, num_entering
from dspark_exp.serving.traffic import LoadResult, Served


@dataclass(frozen=True)
class SimulatedRequest:
    """Outcomes along one answer.

    Attributes:
        prompt_tokens: length of the prompt.
        confidence: [P, G] of a draft whose anchor is the P-th token of the answer.
        accepted: [P] how many of its tokens the target would accept.
    """

    prompt_tokens: int
    confidence: np.ndarray
    accepted: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.accepted) + 1  # the last token is no anchor


@dataclass
class _Flight:
    request: SimulatedRequest
    submitted_at: float
    first_token_at: float = 0.0
    position: int = 0  # of the anchor
    rounds: list[Round] = field(default_factory=list)


def simulate(
    requests: Sequence[SimulatedRequest],
    curve: CapacityCurve,
    policy: VerificationPolicy | None,
    *,
    num_rows: int,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    calibrate: Callable[[np.ndarray], np.ndarray] | None = None,
    early_exit: EarlyExit | None = None,
    max_prefill_tokens: int = MAX_PREFILL_TOKENS,
) -> LoadResult:
    """Serve all requests. No policy = plain decoding without a drafter. See ``drive`` for the kinds of load."""
    waiting = deque(_Flight(r, t) for r, t in zip(requests, arrivals or [0.0] * len(requests), strict=True))
    if policy is not None:
        policy.start()
    rows = num_rows if concurrency is None else min(num_rows, concurrency)
    clock, busy = 0.0, 0.0
    active, served, rotation = list[_Flight](), list[Served](), Rotation()
    while waiting or active:
        arrived = takewhile(lambda flight: flight.submitted_at <= clock, waiting)  # noqa: B023 - read at once
        prompts = (flight.request.prompt_tokens for flight in arrived)
        entering = [waiting.popleft() for _ in range(num_entering(prompts, rows - len(active), max_prefill_tokens))]
        if entering:
            prefill = curve.enter_s(sum(f.request.prompt_tokens for f in entering))
            clock, busy = clock + prefill, busy + prefill
            for flight in entering:
                flight.first_token_at = clock
                if arrivals is None:
                    flight.submitted_at = clock
            active += entering
        if not active:
            clock = max(clock, waiting[0].submitted_at)
            continue
        seconds = _round(active, curve, policy, rotation, calibrate, early_exit)
        clock, busy = clock + seconds, busy + seconds
        served += [_served(f, clock) for f in active if f.position >= len(f.request.accepted)]
        active = [f for f in active if f.position < len(f.request.accepted)]
    return LoadResult(clock, served, busy)


def _round(
    active: list[_Flight],
    curve: CapacityCurve,
    policy: VerificationPolicy | None,
    rotation: Rotation,
    calibrate: Callable[[np.ndarray], np.ndarray] | None,
    early_exit: EarlyExit | None,
) -> float:
    """Advance all requests by one round; returns its seconds."""
    count = len(active)
    chosen = rotation.choose(policy.num_drafting(count), count) if policy is not None else []
    drafting = [i for i in chosen if early_exit is None or early_exit.drafts(active[i].rounds)]
    lengths = np.zeros(count, dtype=np.int64)
    size = active[0].request.confidence.shape[1]
    if drafting:
        assert policy is not None
        confidence = np.stack([active[i].request.confidence[active[i].position] for i in drafting])
        seen = confidence if calibrate is None else calibrate(confidence)
        lengths[drafting] = policy.lengths(seen, len(drafting), size)
        if policy.remembers:
            worth = [int(active[i].request.accepted[active[i].position]) for i in drafting]
            policy.observe(None, lengths[drafting], np.minimum(worth, lengths[drafting]))
    drafted = set(drafting)
    for index, flight in enumerate(active):
        left = len(flight.request.accepted) - flight.position
        accepted = min(int(lengths[index]), int(flight.request.accepted[flight.position]))
        emitted = min(accepted + 1, left)
        flight.position += emitted
        flight.rounds.append(Round(size if index in drafted else 0, int(lengths[index]), accepted, emitted))
    if not drafting:
        return curve.plain_s(count)
    whole = float(curve.round_s(count, count + int(lengths.sum())))
    if len(drafting) == count:
        return whole
    # requests that do not draft save their share of what drafting costs
    overhead = float(curve.round_s(count, count)) - curve.plain_s(count)
    return whole - overhead + float(curve.round_s(len(drafting), len(drafting))) - curve.plain_s(len(drafting))


def _served(flight: _Flight, clock: float) -> Served:
    tokens = flight.request.num_tokens
    return Served(
        tokens=tokens,
        rounds=len(flight.rounds),
        verified=sum(r.verified for r in flight.rounds),
        drafted_rounds=sum(r.drafted > 0 for r in flight.rounds),
        first_token_s=flight.first_token_at - flight.submitted_at,
        tokens_per_s=(tokens - 1) / max(clock - flight.first_token_at, 1e-9),
    )
