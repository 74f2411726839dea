"""Requests in flight: one draft and one verification of all of them at a time.

In: requests that enter and leave between rounds. Out: their generations, token by token. A verification pass is one
flattened forward of B = sum(1 + l_r) tokens. Device and host meet once a round, when the verdict is read (twice where
a policy reads this round's confidence). With no drafter it is plain decoding.
Knows nothing about queues, training or metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark_exp.contracts import Proposal, TargetFacts
from dspark_exp.decoding.policies import VerificationPolicy
from dspark_exp.decoding.requests import Progress, Request, Round
from dspark_exp.decoding.sampling import Sampling
from dspark_exp.decoding.verification import verify_block, verify_greedy

MakeCache = Callable[[int, int, int, int, int], Any]


class DecodingTarget(Protocol):
    """What decoding asks of a target."""

    facts: TargetFacts

    @property
    def device(self) -> torch.device: ...

    def forward_ragged(self, tokens_B: Tensor, plan: Any) -> tuple[Tensor, Tensor]: ...

    def logits(self, final: Tensor) -> Tensor: ...

    def new_cache(self, num_rows: int, max_length: int) -> Any: ...


class DecodingDrafter(Protocol):
    """What decoding asks of a drafter."""

    block_size: int

    def cache_geometry(self) -> tuple[int, int, int]: ...

    def extend(
        self, store: Any, rows: list[int], starts: list[int], counts: list[int], taps_BE: Tensor, next_B: Tensor
    ) -> Tensor | None: ...

    def propose(
        self,
        store: Any,
        rows: list[int],
        anchors: list[int],
        anchor_ids: Tensor,
        carry: Any,
        sampler: Any,
        uniform: Tensor,
    ) -> Proposal: ...


@dataclass
class Clock:
    """Seconds of each part of a decoding run, prefill included."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    head_s: float = 0.0  # of the sequential head, not part of draft_s
    verify_s: float = 0.0
    extend_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class _Verified:
    """A round as the host sees it."""

    drafted: list[list[int]]  # [R][G]
    accepted: list[int]
    next_token: list[int]
    confidence: list[list[float]] | None  # [R][G]


class DecodingBatch:
    """``num_rows`` rows of the caches and the requests in them.

    Args:
        target: the frozen model.
        drafter: proposes blocks; None decodes plainly, one token a pass.
        make_cache: ``(layers, rows, kv_heads, max_length, head_dim) -> key/value store`` for the drafter.
        sampling: one setting for drafter and target: p_d is the distribution really sampled from.
        policy: how many drafted tokens are verified.
        num_rows: requests in flight at most.
        max_length: positions of a row: prompt, new tokens, and one block more.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafter: DecodingDrafter | None,
        make_cache: MakeCache,
        sampling: Sampling,
        policy: VerificationPolicy,
        num_rows: int,
        max_length: int,
    ) -> None:
        self.target, self.drafter, self.sampling, self.policy = target, drafter, sampling, policy
        self.block_size = drafter.block_size if drafter is not None else 0
        self.num_rows, self.max_length = num_rows, max_length
        self.active: dict[int, Progress] = {}
        self.clock = Clock()
        self._stop_ids = frozenset(target.facts.stop_ids)
        self._carry: dict[int, Tensor] = {}
        self._cache = target.new_cache(num_rows, max_length)
        self._store: Any = None
        if drafter is not None:
            layers, kv_heads, head_dim = drafter.cache_geometry()
            self._store = make_cache(layers, num_rows, kv_heads, max_length, head_dim)

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self.active)

    def needs(self, request: Request) -> int:
        """Positions of a row that a request may fill."""
        return len(request.prompt_ids) + request.max_new_tokens + self.block_size + 1

    @torch.no_grad()
    def enter(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Prefill (index, request) pairs into free rows, one flattened pass; each first token is the target's own."""
        started = time.perf_counter()
        free = [row for row in range(self.num_rows) if row not in self.active]
        entering = {row: Progress(*pair, self._stop_ids) for row, pair in zip(free, requests, strict=False)}
        rows, device = list(entering), self.target.device
        counts = [len(p.request.prompt_ids) for p in entering.values()]
        flat = [token for p in entering.values() for token in p.request.prompt_ids]
        plan = self._cache.causal_pass(rows, [0] * len(rows), counts)
        taps, final = self.target.forward_ragged(torch.tensor(flat, device=device), plan)
        ends = np.cumsum(counts) - 1
        uniform = torch.stack([p.uniforms(1) for p in entering.values()]).to(device)
        last = torch.from_numpy(ends).to(device)
        first = self.sampling.sample(self.target.logits(final[last]), uniform[:, 0])[0].tolist()
        following = np.array([*flat[1:], 0])
        following[ends] = first
        for progress, token, count in zip(entering.values(), first, counts, strict=True):
            progress.emit([token])
            progress.length = count
        self._extend(rows, [0] * len(rows), counts, taps, following)
        self.active |= entering
        self.clock.prefill_s += time.perf_counter() - started

    def leave(self, rows: Sequence[int], close_gaps: bool) -> list[Progress]:
        """Take requests out. ``close_gaps``: the others move to rows 0 .. n-1, so that no pass gathers their keys."""
        left = [self.active.pop(row) for row in rows]
        for row in rows:
            self._carry.pop(row, None)
        if close_gaps:
            for hole in [row for row in range(len(self.active)) if row not in self.active]:
                self._move(max(self.active), hole)
        return left

    def _move(self, source: int, hole: int) -> None:
        self.active[hole] = self.active.pop(source)
        for store in (s for s in (self._cache, self._store) if s is not None):
            store.move(source, hole, self.active[hole].length)
        if source in self._carry:
            self._carry[hole] = self._carry.pop(source)

    @torch.no_grad()
    def round(self) -> None:
        """Draft, verify and commit once for every request that has not ended."""
        rows = [row for row in sorted(self.active) if not self.active[row].done]
        if not rows:
            return
        progress = [self.active[row] for row in rows]
        device, size = self.target.device, self.block_size
        anchors = [p.length for p in progress]
        anchor_ids = torch.tensor([p.anchor_id for p in progress], device=device)
        uniform = torch.stack([p.uniforms(2 * size + 1) for p in progress]).to(device)
        clock = time.perf_counter()
        proposal = self._propose(rows, anchors, anchor_ids, uniform[:, :size])
        lengths = np.zeros(len(rows), dtype=np.int64)
        if proposal is not None:
            lengths = np.asarray(self.policy.lengths(proposal.confidence, len(rows), size), dtype=np.int64)
        clock = self._drafted(clock, proposal)
        outcome, taps = self._verify(rows, anchors, anchor_ids, proposal, lengths, uniform[:, size:])
        clock, self.clock.verify_s = time.perf_counter(), self.clock.verify_s + time.perf_counter() - clock
        self._commit(progress, outcome, lengths)
        self._extend_accepted(rows, anchors, outcome, lengths, taps)
        self.clock.extend_s += time.perf_counter() - clock

    def _drafted(self, started: float, proposal: Proposal | None) -> float:
        head_s, now = proposal.head_s if proposal is not None else 0.0, time.perf_counter()
        self.clock.draft_s += now - started - head_s
        self.clock.head_s += head_s
        return now

    def _propose(self, rows: list[int], anchors: list[int], anchor_ids: Tensor, uniform: Tensor) -> Proposal | None:
        if self.drafter is None:
            return None
        carry = torch.stack([self._carry[row] for row in rows]) if self._carry else None
        return self.drafter.propose(self._store, rows, anchors, anchor_ids, carry, self.sampling, uniform)

    def _verify(
        self,
        rows: list[int],
        anchors: list[int],
        anchor_ids: Tensor,
        proposal: Proposal | None,
        lengths: np.ndarray,
        uniform: Tensor,
    ) -> tuple[_Verified, Tensor]:
        """One pass of the target over anchors and chosen tokens, and the round's one read of the device."""
        device, width = self.target.device, self.block_size + 1
        plan = self._cache.causal_pass(rows, anchors, (lengths + 1).tolist())
        block = anchor_ids[:, None]
        if proposal is not None:
            block = torch.cat([block, proposal.tokens], dim=1)
        index = np.flatnonzero(np.arange(width) <= lengths[:, None])
        chosen = None if len(index) == block.numel() else torch.from_numpy(index).to(device)
        tokens = block.flatten() if chosen is None else block.flatten()[chosen]
        taps, final = self.target.forward_ragged(tokens, plan)
        logits = self.target.logits(final)
        if proposal is None:
            accepted, next_token = torch.zeros_like(anchor_ids), self.sampling.sample(logits, uniform[:, 0])[0]
        else:
            on_device = torch.from_numpy(lengths).to(device)
            accepted, next_token = self._verdict(proposal, logits, chosen, on_device, uniform)
        return _fetch(block, accepted, next_token, proposal), taps

    def _verdict(
        self, proposal: Proposal, logits_BV: Tensor, chosen: Tensor | None, lengths: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = (len(lengths), self.block_size + 1)
        if proposal.probs is None:
            best = _spread(logits_BV.argmax(-1), chosen, shape)
            verdict = verify_greedy(best, proposal.tokens, lengths)
        else:
            probs = _spread(self.sampling.probs(logits_BV), chosen, shape)
            verdict = verify_block(proposal.probs, probs, proposal.tokens, lengths, uniform[:, :-1], uniform[:, -1])
        return verdict.num_accepted, verdict.next_token

    def _commit(self, progress: list[Progress], outcome: _Verified, lengths: np.ndarray) -> None:
        for index, request in enumerate(progress):
            count, verified = outcome.accepted[index], int(lengths[index])
            emitted = request.emit([*outcome.drafted[index][:count], outcome.next_token[index]])
            request.length += count + 1
            if emitted <= count:  # the end fell inside the accepted tokens: what follows it does not exist
                count = verified = emitted
            confidence = () if outcome.confidence is None else tuple(outcome.confidence[index])
            request.generation.rounds.append(Round(self.block_size, verified, count, emitted, confidence))

    def _extend_accepted(
        self, rows: list[int], anchors: list[int], outcome: _Verified, lengths: np.ndarray, taps: Tensor
    ) -> None:
        """Give the drafter the target's features of the anchor and the accepted tokens."""
        kept = [count + 1 for count in outcome.accepted]
        if sum(kept) < len(taps):
            starts = np.cumsum(lengths + 1) - (lengths + 1)
            index = np.concatenate([np.arange(s, s + k) for s, k in zip(starts, kept, strict=True)])
            taps = taps[torch.from_numpy(index).to(taps.device)]
        following = [
            token
            for drafted, count, last in zip(outcome.drafted, outcome.accepted, outcome.next_token, strict=True)
            for token in (*drafted[:count], last)
        ]
        self._extend(rows, anchors, kept, taps, np.array(following))

    def _extend(
        self, rows: list[int], starts: list[int], counts: list[int], taps: Tensor, following: np.ndarray
    ) -> None:
        if self.drafter is None:
            return
        next_B = torch.from_numpy(following).to(taps.device)
        carry = self.drafter.extend(self._store, rows, starts, counts, taps, next_B)
        if carry is not None:
            self._carry.update(zip(rows, carry, strict=True))


def _fetch(block: Tensor, accepted: Tensor, next_token: Tensor, proposal: Proposal | None) -> _Verified:
    """Everything the host needs of a round in one transfer; confidences travel as the bits of a float32."""
    parts = [block[:, 1:], accepted[:, None], next_token[:, None]]
    confidence = None if proposal is None else proposal.confidence
    if confidence is not None:
        parts.append(confidence.float().view(torch.int32))
    host = torch.cat([part.long() for part in parts], dim=1).cpu().numpy()
    size = block.shape[1] - 1
    bits = host[:, size + 2 :].astype(np.int32)
    return _Verified(
        host[:, :size].tolist(),
        host[:, size].tolist(),
        host[:, size + 1].tolist(),
        bits.view(np.float32).tolist() if confidence is not None else None,
    )


def _spread(values_B: Tensor, chosen: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """[B, ...] -> [R, G+1, ...]; what was not verified is zero and is not read."""
    if chosen is None:
        return values_B.view(*shape, *values_B.shape[1:])
    rows = shape[0] * shape[1]
    spread = values_B.new_zeros(rows, *values_B.shape[1:]).index_copy_(0, chosen, values_B)
    return spread.view(*shape, *values_B.shape[1:])
