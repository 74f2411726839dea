"""The speculative loop over a batch of requests that advance by different amounts.

In: prompts. Out: generations and their rounds, in the order of the requests. Finished requests leave, waiting ones
enter. A verification pass is one flattened forward of B = sum(1 + l_r) tokens. With no drafter it is plain decoding.
Knows nothing about training or metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_exp.contracts import Proposal, TargetFacts
from dspark_exp.decoding.policies import Full, VerificationPolicy
from dspark_exp.decoding.requests import Generation, Progress, Request, Round
from dspark_exp.decoding.sampling import Sampling
from dspark_exp.decoding.verification import verify_block, verify_greedy
from dspark_exp.errors import ConfigError


class DecodingTarget(Protocol):
    """What the loop asks of a target."""

    facts: TargetFacts

    @property
    def device(self) -> torch.device: ...

    def forward_ragged(self, tokens_B: Tensor, plan: Any) -> tuple[Tensor, Tensor]: ...

    def logits(self, final: Tensor) -> Tensor: ...

    def new_cache(self, num_rows: int, max_length: int) -> Any: ...


class DecodingDrafter(Protocol):
    """What the loop asks of a drafter."""

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


class SpeculativeLoop:
    """Draft, verify, commit, until every request has ended.

    Args:
        target: the frozen model.
        drafter: proposes blocks; None decodes plainly, one token a pass.
        make_cache: ``(layers, rows, kv_heads, max_length, head_dim) -> key/value store`` for the drafter.
        sampling: one setting for drafter and target: p_d is the distribution really sampled from.
        policy: how many drafted tokens are verified.
        batch_size: requests in flight at most.

    Raises:
        ConfigError: batch size below one, or a policy that the drafter cannot serve.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafter: DecodingDrafter | None,
        make_cache: Callable[[int, int, int, int, int], Any],
        sampling: Sampling,
        policy: VerificationPolicy | None = None,
        batch_size: int = 16,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"evaluation.batch_size={batch_size}: expected at least 1.")
        self.target, self.drafter, self._make_cache = target, drafter, make_cache
        self.sampling, self.policy, self.batch_size = sampling, policy or Full(), batch_size
        self.block_size = drafter.block_size if drafter is not None else 0
        self._stop_ids = frozenset(target.facts.stop_ids)
        self.clock = Clock()
        self._carry: dict[int, Tensor] = {}
        if drafter is not None:
            self.policy.check(self.block_size, getattr(drafter, "confidence_head", None) is not None)

    @torch.no_grad()
    def run(
        self, requests: Sequence[Request], on_finished: Callable[[int, Generation], None] | None = None
    ) -> list[Generation]:
        """Generate for every request; ``on_finished(index, generation)`` is called as each one ends."""
        started = time.perf_counter()
        self.clock = Clock()
        results: list[Generation | None] = [None] * len(requests)
        if not requests:
            return []
        self._carry.clear()
        num_rows = min(self.batch_size, len(requests))
        longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + self.block_size + 1
        cache = self.target.new_cache(num_rows, longest)
        store = None
        if self.drafter is not None:
            layers, kv_heads, head_dim = self.drafter.cache_geometry()
            store = self._make_cache(layers, num_rows, kv_heads, longest, head_dim)
        waiting = list(enumerate(requests))[::-1]
        active: dict[int, Progress] = {}
        while waiting or active:
            free = [row for row in range(num_rows) if row not in active]
            entering = {row: Progress(*waiting.pop(), self._stop_ids) for row in free[: len(waiting)] if waiting}
            if entering:
                self._prefill(entering, cache, store)
                active.update(entering)
            if any(not p.done for p in active.values()):
                self._round({row: active[row] for row in sorted(active) if not active[row].done}, cache, store)
            for row in [row for row, progress in active.items() if progress.done]:
                progress = active.pop(row)
                results[progress.index] = progress.generation
                if on_finished is not None:
                    on_finished(progress.index, progress.generation)
            if not waiting:
                self._close_gaps(active, [cache, store])
        self.clock.total_s = time.perf_counter() - started
        return [generation for generation in results if generation is not None]

    def _close_gaps(self, active: dict[int, Progress], stores: list[Any]) -> None:
        """Requests in flight take rows 0 .. n-1, so that a pass reads their keys without gathering them."""
        for hole in [row for row in range(len(active)) if row not in active]:
            last = max(active)
            active[hole] = active.pop(last)
            for store in (s for s in stores if s is not None):
                store.move(last, hole, active[hole].length)
            if last in self._carry:
                self._carry[hole] = self._carry.pop(last)

    def _prefill(self, entering: dict[int, Progress], cache: Any, store: Any) -> None:
        """One flattened pass over all new prompts; the first token of each is the target's own."""
        started = time.perf_counter()
        rows, device = list(entering), self.target.device
        prompts = [p.request.prompt_ids for p in entering.values()]
        counts = [len(ids) for ids in prompts]
        starts = [0] * len(rows)
        tokens = torch.tensor([token for ids in prompts for token in ids], device=device)
        taps, final = self.target.forward_ragged(tokens, cache.causal_pass(rows, starts, counts))
        ends = torch.tensor(counts, device=device).cumsum(0)
        uniform = torch.stack([p.uniforms(1) for p in entering.values()]).to(device)
        first, _ = self.sampling.sample(self.target.logits(final[ends - 1]), uniform[:, 0])
        following = torch.cat([tokens[1:], tokens[:1]])
        following[ends - 1] = first
        for progress, token, count in zip(entering.values(), first.tolist(), counts, strict=True):
            progress.emit([token])
            progress.length = count
        self._extend(store, rows, starts, counts, taps, following)
        self.clock.prefill_s += time.perf_counter() - started

    def _extend(
        self, store: Any, rows: list[int], starts: list[int], counts: list[int], taps: Tensor, following: Tensor
    ) -> None:
        if self.drafter is None:
            return
        carry = self.drafter.extend(store, rows, starts, counts, taps, following)
        if carry is not None:
            self._carry.update(zip(rows, carry, strict=True))

    def _round(self, active: dict[int, Progress], cache: Any, store: Any) -> None:
        rows, progress = list(active), list(active.values())
        device, size = self.target.device, self.block_size
        anchors = [p.length for p in progress]
        anchor_ids = torch.tensor([p.anchor_id for p in progress], device=device)
        uniform = torch.stack([p.uniforms(2 * size + 1) for p in progress]).to(device)
        clock = time.perf_counter()
        proposal = self._propose(rows, anchors, anchor_ids, uniform[:, :size], store)
        lengths = torch.zeros(len(rows), dtype=torch.long)
        if proposal is not None:
            lengths = self.policy.lengths(proposal.confidence, len(rows), size).long()
        head_s = proposal.head_s if proposal is not None else 0.0
        clock, self.clock.draft_s = time.perf_counter(), self.clock.draft_s + time.perf_counter() - clock - head_s
        self.clock.head_s += head_s
        counts = (lengths + 1).tolist()
        block = anchor_ids[:, None]
        if proposal is not None:
            block = torch.cat([block, proposal.tokens], dim=1)
        chosen = (torch.arange(size + 1) <= lengths[:, None]).to(device)
        tokens = block[chosen]
        taps, final = self.target.forward_ragged(tokens, cache.causal_pass(rows, anchors, counts))
        logits = self.target.logits(final)
        accepted, next_token = self._verify(proposal, logits, chosen, lengths.to(device), uniform[:, size:])
        clock, self.clock.verify_s = time.perf_counter(), self.clock.verify_s + time.perf_counter() - clock
        self._commit(progress, proposal, block, accepted, next_token, lengths)
        kept = torch.tensor(accepted) + 1
        self._extend_accepted(store, rows, anchors, kept, chosen, block, next_token, taps)
        self.clock.extend_s += time.perf_counter() - clock

    def _propose(
        self, rows: list[int], anchors: list[int], anchor_ids: Tensor, uniform: Tensor, store: Any
    ) -> Proposal | None:
        if self.drafter is None:
            return None
        carry = torch.stack([self._carry[row] for row in rows]) if self._carry else None
        return self.drafter.propose(store, rows, anchors, anchor_ids, carry, self.sampling, uniform)

    def _verify(
        self, proposal: Proposal | None, logits_BV: Tensor, chosen: Tensor, lengths: Tensor, uniform: Tensor
    ) -> tuple[list[int], Tensor]:
        if proposal is None:
            return [0] * len(lengths), self.sampling.sample(logits_BV, uniform[:, 0])[0]
        if proposal.probs is None:
            best = torch.zeros_like(chosen, dtype=torch.long)
            best[chosen] = logits_BV.argmax(-1)
            verdict = verify_greedy(best, proposal.tokens, lengths)
            return verdict.num_accepted.tolist(), verdict.next_token
        flat_probs = self.sampling.probs(logits_BV)
        if len(flat_probs) == chosen.numel():
            target_probs = flat_probs.view(*chosen.shape, -1)
        else:
            target_probs = flat_probs.new_zeros(*chosen.shape, flat_probs.shape[-1])
            target_probs[chosen] = flat_probs
        verdict = verify_block(proposal.probs, target_probs, proposal.tokens, lengths, uniform[:, :-1], uniform[:, -1])
        return verdict.num_accepted.tolist(), verdict.next_token

    def _commit(
        self,
        progress: list[Progress],
        proposal: Proposal | None,
        block: Tensor,
        accepted: list[int],
        next_token: Tensor,
        lengths: Tensor,
    ) -> None:
        drafted = block[:, 1:].tolist()
        following = next_token.tolist()
        confidence = proposal.confidence.tolist() if proposal is not None and proposal.confidence is not None else None
        for index, request in enumerate(progress):
            count, verified = accepted[index], int(lengths[index])
            emitted = request.emit([*drafted[index][:count], following[index]])
            request.length += count + 1
            if emitted <= count:  # the end fell inside the accepted tokens: what follows it does not exist
                count = verified = emitted
            request.generation.rounds.append(
                Round(
                    drafted=self.block_size,
                    verified=verified,
                    accepted=count,
                    emitted=emitted,
                    confidence=() if confidence is None else tuple(confidence[index]),
                )
            )

    def _extend_accepted(
        self,
        store: Any,
        rows: list[int],
        anchors: list[int],
        kept: Tensor,
        chosen: Tensor,
        block: Tensor,
        next_token: Tensor,
        taps: Tensor,
    ) -> None:
        """Give the drafter the target's features of the anchor and the accepted tokens."""
        if self.drafter is None:
            return
        is_kept = torch.arange(chosen.shape[1]) < kept[:, None]
        following = torch.cat([block[:, 1:], next_token[:, None]], dim=1)
        following[torch.arange(len(rows)), kept - 1] = next_token
        is_kept = is_kept.to(chosen.device)
        self._extend(store, rows, anchors, kept.tolist(), taps[is_kept[chosen]], following[is_kept])
