"""The speculative loop over a list of requests that advance by different amounts.

In: prompts. Out: generations and their rounds, in the order of the requests. Finished requests leave, waiting ones
enter, so a long answer never holds the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dspark_exp.decoding.batch import (
    Calibrate,
    Clock,
    DecodingBatch,
    DecodingDrafter,
    DecodingTarget,
    MakeCache,
)
from dspark_exp.decoding.early_exit import EarlyExit
from dspark_exp.decoding.policies import Full, VerificationPolicy, check_policy
from dspark_exp.decoding.requests import Generation, Request, positions_needed
from dspark_exp.decoding.sampling import Sampling
from dspark_exp.errors import ConfigError


class SpeculativeLoop:
    """Draft, verify, commit, until every request has ended.

    Args:
        target, drafter, make_cache, sampling, policy: see ``DecodingBatch``; no policy verifies whole blocks.
        batch_size: requests in flight at most.
        calibrate, early_exit, record_overlap: see ``DecodingBatch``.

    Raises:
        ConfigError: batch size below one, or a policy that the drafter cannot serve.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafter: DecodingDrafter | None,
        make_cache: MakeCache,
        sampling: Sampling,
        policy: VerificationPolicy | None = None,
        batch_size: int = 16,
        calibrate: Calibrate | None = None,
        early_exit: EarlyExit | None = None,
        record_overlap: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"evaluation.batch_size={batch_size}: expected at least 1.")
        self.target, self.drafter, self._make_cache = target, drafter, make_cache
        self.sampling, self.policy, self.batch_size = sampling, policy or Full(), batch_size
        self._calibrate, self._early_exit, self._record_overlap = calibrate, early_exit, record_overlap
        self.clock = Clock()
        if drafter is not None:
            check_policy(self.policy, drafter)

    def run(
        self, requests: Sequence[Request], on_finished: Callable[[int, Generation], None] | None = None
    ) -> list[Generation]:
        """Generate for every request; ``on_finished(index, generation)`` is called as each one ends."""
        started = time.perf_counter()
        results: list[Generation | None] = [None] * len(requests)
        if not requests:
            return []
        batch = self._open(requests)
        # the longest prompts first: what decodes together is of like length, and memory runs out at once or not at all;
        # samples of one prompt follow one another, to enter together
        waiting = sorted(enumerate(requests), key=lambda pair: (len(pair[1].prompt_ids), pair[1].prompt_ids))
        while waiting or batch.active:
            if waiting and batch.num_free:
                batch.enter([waiting.pop() for _ in range(min(batch.num_free, len(waiting)))])
            batch.round()
            ended = [row for row, progress in batch.active.items() if progress.done]
            for progress in batch.leave(ended):
                results[progress.index] = progress.generation
                if on_finished is not None:
                    on_finished(progress.index, progress.generation)
        self.clock = batch.clock
        self.clock.total_s = time.perf_counter() - started
        return [generation for generation in results if generation is not None]

    def _open(self, requests: Sequence[Request]) -> DecodingBatch:
        num_rows = min(self.batch_size, len(requests))
        block_size = self.drafter.block_size if self.drafter is not None else 0
        longest = max(positions_needed(r, block_size) for r in requests)
        return DecodingBatch(
            self.target,
            self.drafter,
            self._make_cache,
            self.sampling,
            self.policy,
            num_rows,
            longest,
            self._calibrate,
            self._early_exit,
            self._record_overlap,
        )
