"""The serving engine: requests come and go at any time, rounds run over all that are in flight.

In: requests from any thread. Out: tokens through callbacks from the thread that steps. One engine owns one target, one
drafter and their key/value rows. A request that fails, is cancelled or has a failing callback takes no other with it.
Knows nothing about HTTP or tokenizers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from dspark_exp.decoding import DecodingBatch, Generation, Request, Round
from dspark_exp.errors import DataError, DsparkError

log = logging.getLogger(__name__)
OnTokens = Callable[[list[int]], None]
OnEnd = Callable[[], None]
MAX_PREFILL_TOKENS = 2048
_COUNTED = (
    "submitted", "finished", "cancelled", "failed", "rejected", "tokens", "rounds",
    "answers", "answer_rounds", "drafted_tokens", "verified_tokens", "accepted_tokens",
)  # fmt: skip


def num_entering(prompt_tokens: Iterable[int], num_free: int, max_prefill_tokens: int) -> int:
    """How many waiting requests enter before the next round: as rows and prefill limit allow, one at least.

    Args:
        prompt_tokens: of the requests that wait, first come first.
    """
    count = tokens = 0
    for length in islice(prompt_tokens, num_free):
        tokens += length
        if count and tokens > max_prefill_tokens:
            break
        count += 1
    return count


class QueueFull(DsparkError):
    """No room to wait; try again later."""


@dataclass
class Ticket:
    """A request on its way. Times are seconds of the engine's clock; 0 = not yet.

    Attributes:
        status: waiting, running, finished, cancelled or failed.
        error: why it failed.
    """

    number: int
    request: Request
    on_tokens: OnTokens | None
    submitted_at: float
    on_end: OnEnd | None = None
    status: str = "waiting"
    error: str = ""
    first_token_at: float = 0.0
    finished_at: float = 0.0
    generation: Generation = field(default_factory=Generation)
    ended: threading.Event = field(default_factory=threading.Event)
    reported: int = 0  # tokens given to the callback

    @property
    def rounds(self) -> list[Round]:
        return self.generation.rounds

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token_at - self.submitted_at

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time since the first: what a user sees stream."""
        return (len(self.generation.token_ids) - 1) / max(self.finished_at - self.first_token_at, 1e-9)


class Engine:
    """Continuous batching over a ``DecodingBatch``.

    ``counts``: requests by how they ended; ``tokens`` and ``rounds`` of the engine; of the answers that ended, their
    number, their rounds, and their drafted, verified and accepted draft tokens.

    Args:
        batch: rows, caches, drafter, policy.
        max_queue: requests that may wait for a row.
        max_prefill_tokens: prompt tokens that enter between two rounds at most (one prompt always may), so that a long
            queue does not stall those in flight.
        clock: seconds from any start.
    """

    def __init__(
        self,
        batch: DecodingBatch,
        max_queue: int = 1024,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._batch, self._max_queue, self._max_prefill = batch, max_queue, max_prefill_tokens
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._dismissed: dict[int, str] = {}  # number -> how it ends
        self._next_number = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.waited_s = 0.0  # sum of times to first token, of the requests that ended

    # any thread

    def submit(self, request: Request, on_tokens: OnTokens | None = None, on_end: OnEnd | None = None) -> Ticket:
        """Queue a request; ``on_tokens`` gets new tokens, ``on_end`` follows the last, from the engine's thread.

        Raises:
            DataError: an empty prompt, ids outside the vocabulary, a seed outside 0..2^63-1, no new tokens, or more
                positions than a row of the cache has.
            QueueFull: too many wait already.
        """
        self._check(request)
        with self._lock:
            if len(self._waiting) >= self._max_queue:
                self.counts["rejected"] += 1
                raise QueueFull(f"{self._max_queue} requests wait already; try again later (serving.max_queue).")
            ticket = Ticket(self._next_number, request, on_tokens, self._clock(), on_end)
            self._next_number += 1
            self.counts["submitted"] += 1
            self._waiting.append(ticket)
            self._arrived.notify()
        return ticket

    def room(self, prompt_ids: list[int]) -> int:
        """New tokens that a row of the cache holds after this prompt; 1 at least."""
        return max(1, self._batch.max_length - self._batch.needs(Request(prompt_ids, 0, 0)))

    def cancel(self, ticket: Ticket) -> None:
        """Free what the request holds, at the next round at the latest; what ended already stays ended."""
        self._dismiss(ticket, "cancelled")

    def finish(self, ticket: Ticket) -> None:
        """The caller has all it wants of this request: as ``cancel``, but it ends as finished."""
        self._dismiss(ticket, "finished")

    def start(self) -> None:
        """Step in a thread of the engine's own until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that have not ended are cancelled."""
        with self._lock:
            self._stopping = True
            self._arrived.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail_all("cancelled", "the engine stopped")

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # the stepping thread

    def step(self) -> bool:
        """Let requests enter, run one round, hand out its tokens. False = there was nothing to do."""
        self._drop_dismissed()
        try:
            self._enter()
            if not self._running:
                return False
            self._batch.round()
        except Exception as error:  # a failing model must end the requests it held, not the engine
            log.exception("A round failed")
            self._fail_all("failed", f"{type(error).__name__}: {error}")
            return True
        self.counts["rounds"] += 1
        self._report()
        return True

    def _check(self, request: Request) -> None:
        """What would fail in a pass is refused here: there it would end the requests beside it."""
        if not request.prompt_ids:
            raise DataError("The prompt is empty: it must hold at least one token.")
        vocab_size = self._batch.target.facts.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            raise DataError(f"Token ids must lie within 0..{vocab_size - 1}.")
        if not 0 <= request.seed < 2**63:
            raise DataError(f"seed={request.seed}: expected a number from 0 to 2^63 - 1.")
        if request.max_new_tokens < 1:
            raise DataError(f"max_new_tokens={request.max_new_tokens}: expected at least 1.")
        needed, available = self._batch.needs(request), self._batch.max_length
        if needed > available:
            raise DataError(
                f"The request needs {needed} positions (prompt {len(request.prompt_ids)}, new tokens "
                f"{request.max_new_tokens}, one block); a row of the cache has {available} (serving.max_length)."
            )

    def _enter(self) -> None:
        with self._lock:
            prompts = (len(ticket.request.prompt_ids) for ticket in self._waiting)
            count = num_entering(prompts, self._batch.num_free, self._max_prefill)
            entering = [self._waiting.popleft() for _ in range(count)]
        if not entering:
            return
        for ticket in entering:
            ticket.status = "running"
            self._running[ticket.number] = ticket
        self._prefill(entering)
        for progress in self._batch.active.values():
            self._running[progress.index].generation = progress.generation
        self._report()

    def _prefill(self, entering: list[Ticket]) -> None:
        """All in one pass; where it fails, one at a time, so that none fails for another."""
        try:
            self._batch.enter([(t.number, t.request) for t in entering])
        except Exception as error:
            if len(entering) > 1:
                for ticket in entering:
                    self._prefill([ticket])
                return
            log.exception("The prefill of request %d failed", entering[0].number)
            self._end(entering[0], "failed", f"{type(error).__name__}: {error}")

    def _report(self) -> None:
        """Give new tokens to their callbacks and let what has ended leave."""
        now, leaving = self._clock(), []
        for row, progress in list(self._batch.active.items()):
            ticket = self._running[progress.index]
            tokens = progress.generation.token_ids[ticket.reported :]
            ticket.reported += len(tokens)
            self.counts["tokens"] += len(tokens)
            ticket.first_token_at = ticket.first_token_at or now
            failed = not self._tell(ticket, tokens)
            if progress.done or failed:
                leaving.append(row)
                self._end(ticket, "failed" if failed else "finished", ticket.error)
        self._batch.leave(leaving)

    def _tell(self, ticket: Ticket, tokens: list[int]) -> bool:
        if ticket.on_tokens is None or not tokens:
            return True
        try:
            ticket.on_tokens(tokens)
        except Exception as error:  # the callback is the caller's; its fault ends its own request alone
            ticket.error = f"callback: {type(error).__name__}: {error}"
            return False
        return True

    def _end(self, ticket: Ticket, status: str, error: str = "") -> None:
        with self._lock:
            self._running.pop(ticket.number, None)
            self._dismissed.pop(ticket.number, None)
            self.counts[status] += 1
            ticket.status, ticket.error, ticket.finished_at = status, error, self._clock()
            self._count(ticket)
            ticket.ended.set()
        if ticket.on_end is not None:
            try:
                ticket.on_end()
            except Exception:  # the caller's fault; the request has ended all the same
                log.exception("on_end of request %d failed", ticket.number)

    def _count(self, ticket: Ticket) -> None:
        """Add what an answer took to the sums, when it ends."""
        if not ticket.first_token_at:
            return
        self.waited_s += ticket.time_to_first_token_s
        self.counts["answers"] += 1
        self.counts["answer_rounds"] += len(ticket.rounds)
        for name in ("drafted", "verified", "accepted"):
            self.counts[f"{name}_tokens"] += sum(getattr(one, name) for one in ticket.rounds)

    def _dismiss(self, ticket: Ticket, status: str) -> None:
        with self._lock:
            if not ticket.ended.is_set():
                self._dismissed.setdefault(ticket.number, status)
                self._arrived.notify()

    def _drop_dismissed(self) -> None:
        with self._lock:
            wanted = dict(self._dismissed)
            gone = [t for t in self._waiting if t.number in wanted]
            self._waiting = deque(t for t in self._waiting if t.number not in wanted) if gone else self._waiting
        rows = [row for row, progress in self._batch.active.items() if progress.index in wanted]
        gone += [self._running[self._batch.active[row].index] for row in rows]
        self._batch.leave(rows)
        for ticket in gone:
            self._end(ticket, wanted[ticket.number])

    def _fail_all(self, status: str, error: str) -> None:
        with self._lock:
            tickets = [*self._running.values(), *(self._waiting if status == "cancelled" else ())]
            if status == "cancelled":
                self._waiting.clear()
        self._batch.leave(list(self._batch.active))
        for ticket in tickets:
            self._end(ticket, status, error)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not (self._stopping or self._waiting or self._running):
                    self._arrived.wait()
                if self._stopping:
                    return
            self.step()
