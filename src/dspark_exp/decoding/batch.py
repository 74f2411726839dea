"""Requests in flight: one draft and one verification of all of them at a time.

In: requests that enter and leave between rounds. Out: their generations, token by token. A verification pass is one
flattened forward of B = sum(1 + l_r) tokens. Device and host meet once a round, when the verdict is read (twice where
a policy needs this round's confidence). With no drafter it is plain decoding. A drafter hears of the target's features
when a request is next drafted for: rounds without a draft cost what plain decoding costs.
Knows nothing about queues, training or metrics.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark_exp.contracts import Proposal, TargetFacts
from dspark_exp.decoding.early_exit import EarlyExit
from dspark_exp.decoding.policies import Rotation, VerificationPolicy
from dspark_exp.decoding.requests import Progress, Request, Round, positions_needed, shared_prefills
from dspark_exp.decoding.sampling import Sampling
from dspark_exp.decoding.transfer import Verified, fetch, spread, widened
from dspark_exp.decoding.verification import Verdict, verify_block, verify_greedy

MakeCache = Callable[[int, int, int, int, int], Any]
Calibrate = Callable[[np.ndarray], np.ndarray]
_MOST_UNHEARD = 256  # tokens of a request whose features wait for its next draft


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
class _Features:
    """The target's features of a run of tokens of one request, and the tokens that follow each."""

    start: int
    taps: Tensor  # [n, m*d]
    following: list[int]  # [n]


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
        calibrate: conditional confidences [R, G] as the policy should see them; None = as they are.
        early_exit: which requests draft; None = all.
        record_overlap: rounds of sampled requests keep the analytic acceptance rate (Eq. 8) beside the confidence.
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
        calibrate: Calibrate | None = None,
        early_exit: EarlyExit | None = None,
        record_overlap: bool = False,
    ) -> None:
        self.target, self.drafter, self.sampling, self.policy = target, drafter, sampling, policy
        self._calibrate, self._early_exit, self._record_overlap = calibrate, early_exit, record_overlap
        self.block_size = drafter.block_size if drafter is not None else 0
        self.num_rows, self.max_length = num_rows, max_length
        self.active: dict[int, Progress] = {}
        self.clock = Clock()
        self._stop_ids = frozenset(target.facts.stop_ids)
        self._carry: dict[int, Tensor] = {}
        self._unheard: defaultdict[int, list[_Features]] = defaultdict(list)
        self._rotation, self._is_told = Rotation(), False
        self.policy.start()
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
        return positions_needed(request, self.block_size)

    @torch.no_grad()
    def enter(self, requests: Sequence[tuple[int, Request]]) -> None:
        """Prefill (index, request) pairs into free rows, one flattened pass; each first token is the target's own.

        Prompts that enter together share their prefill where one begins another or is the same: one row computes it,
        the others copy their part.
        """
        started = time.perf_counter()
        free = [row for row in range(self.num_rows) if row not in self.active]
        entering = {row: Progress(*pair, self._stop_ids) for row, pair in zip(free, requests, strict=False)}
        for row in entering:  # what an earlier prefill that failed may have left
            self._unheard.pop(row, None)
        source_of = shared_prefills({row: p.request.prompt_ids for row, p in entering.items()})
        computed, device = sorted(set(source_of.values())), self.target.device
        counts = [len(entering[row].request.prompt_ids) for row in computed]
        plan = self._cache.causal_pass(computed, [0] * len(computed), counts)
        flat = [token for row in computed for token in entering[row].request.prompt_ids]
        taps, final = self.target.forward_ragged(torch.tensor(flat, device=device), plan)
        taps_of, final_of = (dict(zip(computed, x.split(counts), strict=True)) for x in (taps, final))
        last = torch.stack([final_of[source_of[row]][len(p.request.prompt_ids) - 1] for row, p in entering.items()])
        uniform = torch.stack([p.uniforms(1) for p in entering.values()]).to(device)
        first = self.sampling.sample(self.target.logits(last), uniform[:, 0])[0].tolist()
        for (row, progress), token in zip(entering.items(), first, strict=True):
            progress.emit([token])
            progress.length = length = len(progress.request.prompt_ids)
            if (source := source_of[row]) != row:
                self._cache.copy(source, row, length)
            self._hear(row, 0, taps_of[source][:length], [*progress.request.prompt_ids[1:], token])
        self.active |= entering
        self.clock.prefill_s += time.perf_counter() - started

    def leave(self, rows: Sequence[int]) -> list[Progress]:
        """Take requests out."""
        left = [self.active.pop(row) for row in rows]
        for row in rows:
            self._carry.pop(row, None)
            self._unheard.pop(row, None)
        return left

    def _close_gaps(self) -> None:
        """Requests take rows 0 .. n-1, so that no pass gathers their keys."""
        for hole in [row for row in range(len(self.active)) if row not in self.active]:
            self._move(max(self.active), hole)

    def _move(self, source: int, hole: int) -> None:
        self.active[hole] = self.active.pop(source)
        for store in (s for s in (self._cache, self._store) if s is not None):
            store.copy(source, hole, self.active[hole].length)
        if source in self._carry:
            self._carry[hole] = self._carry.pop(source)
        if source in self._unheard:
            self._unheard[hole] = self._unheard.pop(source)

    @torch.no_grad()
    def round(self) -> None:
        """Draft, verify and commit once for every request that has not ended."""
        self._close_gaps()
        rows = [row for row in sorted(self.active) if not self.active[row].done]
        if not rows:
            return
        progress = [self.active[row] for row in rows]
        device, size = self.target.device, self.block_size
        anchors = [p.length for p in progress]
        anchor_ids = torch.tensor([p.anchor_id for p in progress], device=device)
        uniform = torch.stack([p.uniforms(2 * size + 1) for p in progress]).to(device)
        clock = time.perf_counter()
        drafting = self._drafting(progress)
        self._extend(self._to_extend(rows, drafting))
        clock, self.clock.extend_s = time.perf_counter(), self.clock.extend_s + time.perf_counter() - clock
        proposal, lengths = None, np.zeros(len(rows), dtype=np.int64)
        if drafting:
            proposal = self._propose(drafting, rows, anchors, anchor_ids, uniform[:, :size])
            lengths[drafting] = self._lengths(proposal)
            proposal = proposal if len(drafting) == len(rows) else widened(proposal, drafting, len(rows))
        clock = self._drafted(clock, proposal)
        outcome, taps = self._verify(rows, anchors, anchor_ids, proposal, lengths, uniform[:, size:])
        self.clock.verify_s += time.perf_counter() - clock
        if drafting and self.policy.remembers:
            self._tell(drafting, lengths, outcome)
        self._commit(progress, outcome, lengths, frozenset(drafting))
        self._hear_accepted(rows, anchors, outcome, lengths, taps)

    def _drafting(self, progress: list[Progress]) -> list[int]:
        """Places of the requests that draft this round, decided from older rounds alone."""
        if self.drafter is None:
            return []
        chosen = self._rotation.choose(self.policy.num_drafting(len(progress)), len(progress))
        return [i for i in chosen if self._early_exit is None or self._early_exit.drafts(progress[i].generation.rounds)]

    def _to_extend(self, rows: list[int], drafting: list[int]) -> list[int]:
        """Rows that draft, and those whose features would pile up."""
        if len(drafting) == len(rows) or self.drafter is None:
            return rows if drafting else []
        chosen = {rows[index] for index in drafting}
        piled = (row for row in rows if sum(len(run.following) for run in self._unheard[row]) > _MOST_UNHEARD)
        return sorted(chosen.union(piled))

    def _lengths(self, proposal: Proposal) -> np.ndarray:
        confidence, shape = None, (len(proposal.tokens), self.block_size)
        self._is_told = proposal.confidence is not None and self.policy.needs_confidence(*shape)
        if self._is_told:
            confidence = self._calibrated(proposal.confidence.float().cpu().numpy())  # type: ignore[union-attr]
        return np.asarray(self.policy.lengths(confidence, *shape))

    def _calibrated(self, confidence_RG: np.ndarray) -> np.ndarray:
        return confidence_RG if self._calibrate is None else self._calibrate(confidence_RG)

    def _tell(self, drafting: list[int], lengths: np.ndarray, outcome: Verified) -> None:
        """Policies that remember hear how the round ended, from its one transfer."""
        accepted, confidence = np.asarray(outcome.accepted), None if self._is_told else outcome.confidence
        if len(drafting) < len(lengths):
            lengths, accepted = lengths[drafting], accepted[drafting]
            confidence = None if confidence is None else confidence[drafting]
        self.policy.observe(None if confidence is None else self._calibrated(confidence), lengths, accepted)

    def _drafted(self, started: float, proposal: Proposal | None) -> float:
        head_s, now = proposal.head_s if proposal is not None else 0.0, time.perf_counter()
        self.clock.draft_s += now - started - head_s
        self.clock.head_s += head_s
        return now

    def _propose(
        self, drafting: list[int], rows: list[int], anchors: list[int], anchor_ids: Tensor, uniform: Tensor
    ) -> Proposal:
        assert self.drafter is not None
        if len(drafting) < len(rows):
            rows, anchors = [rows[i] for i in drafting], [anchors[i] for i in drafting]
            index = torch.tensor(drafting, device=anchor_ids.device)
            anchor_ids, uniform = anchor_ids[index], uniform[index]
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
    ) -> tuple[Verified, Tensor]:
        """One pass of the target over anchors and chosen tokens, and the round's one read of the device."""
        device, width = self.target.device, self.block_size + 1
        plan = self._cache.causal_pass(rows, anchors, (lengths + 1).tolist())
        if proposal is None:
            block = torch.nn.functional.pad(anchor_ids[:, None], (0, self.block_size))
        else:
            block = torch.cat([anchor_ids[:, None], proposal.tokens], dim=1)
        index = np.flatnonzero(np.arange(width) <= lengths[:, None])
        chosen = None if len(index) == block.numel() else torch.from_numpy(index).to(device)
        tokens = block.flatten() if chosen is None else block.flatten()[chosen]
        taps, final = self.target.forward_ragged(tokens, plan)
        logits = self.target.logits(final)
        if proposal is None:
            verdict = Verdict(torch.zeros_like(anchor_ids), self.sampling.sample(logits, uniform[:, 0])[0])
        else:
            verdict = self._verdict(proposal, logits, chosen, torch.from_numpy(lengths).to(device), uniform)
        return fetch(block, verdict, proposal), taps

    def _verdict(
        self, proposal: Proposal, logits_BV: Tensor, chosen: Tensor | None, lengths: Tensor, uniform: Tensor
    ) -> Verdict:
        shape = (len(lengths), self.block_size + 1)
        if proposal.probs is None:
            best = spread(logits_BV.argmax(-1), chosen, shape)
            return verify_greedy(best, proposal.tokens, lengths)
        probs, coins = spread(self.sampling.probs(logits_BV), chosen, shape), (uniform[:, :-1], uniform[:, -1])
        return verify_block(proposal.probs, probs, proposal.tokens, lengths, *coins, self._record_overlap)

    def _commit(
        self, progress: list[Progress], outcome: Verified, lengths: np.ndarray, drafting: frozenset[int]
    ) -> None:
        for index, request in enumerate(progress):
            count, verified = outcome.accepted[index], int(lengths[index])
            emitted = request.emit([*outcome.drafted[index][:count], outcome.next_token[index]])
            request.length += count + 1
            if emitted <= count:  # the end fell inside the accepted tokens: what follows it does not exist
                count = verified = emitted
            drafted = self.block_size if index in drafting else 0
            real = (tuple(x[index].tolist()) if drafted and x is not None else () for x in outcome.real)
            request.generation.rounds.append(Round(drafted, verified, count, emitted, *real))

    def _hear_accepted(
        self, rows: list[int], anchors: list[int], outcome: Verified, lengths: np.ndarray, taps: Tensor
    ) -> None:
        """Keep the target's features of the anchor and the accepted tokens for the drafter."""
        if self.drafter is None:
            return
        starts = np.cumsum(lengths + 1) - (lengths + 1)
        for index, row in enumerate(rows):
            count = outcome.accepted[index]
            part = taps[starts[index] : starts[index] + count + 1]
            self._hear(row, anchors[index], part, [*outcome.drafted[index][:count], outcome.next_token[index]])

    def _hear(self, row: int, start: int, taps: Tensor, following: list[int]) -> None:
        if self.drafter is not None:
            self._unheard[row].append(_Features(start, taps, following))

    def _extend(self, rows: list[int]) -> None:
        """Give the drafter all features of these rows that it has not heard of."""
        if not rows:
            return
        assert self.drafter is not None
        parts = [self._unheard.pop(row) for row in rows]
        counts = [sum(len(run.following) for run in runs) for runs in parts]
        taps = torch.cat([run.taps for runs in parts for run in runs])
        following = torch.tensor([token for runs in parts for run in runs for token in run.following])
        starts = [runs[0].start for runs in parts]
        carry = self.drafter.extend(self._store, rows, starts, counts, taps, following.to(taps.device))
        if carry is not None:
            self._carry.update(zip(rows, carry, strict=True))
