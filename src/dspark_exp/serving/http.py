"""An OpenAI-compatible front of the engine: completions and chat completions with streaming, models, metrics.

In: HTTP requests. Out: JSON, server-sent events. A bad request gets a JSON error, a full queue 429, and a client that
goes away frees its row. Knows nothing about drafting.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream

from dspark_exp.decoding import Request, Sampling
from dspark_exp.errors import DataError
from dspark_exp.serving.engine import Engine, QueueFull, Ticket

_KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stream", "stream_options", "n", "user", "ignore_eos",
}  # fmt: skip
_POLL_S = 0.2
_END = None


@dataclass(frozen=True)
class Front:
    """What the endpoints need.

    Attributes:
        engine: started by the caller.
        tokenizer: of the target. render: messages -> prompt ids.
        model: the name that /v1/models lists.
        sampling: the engine's own; a request may repeat it but not change it.
        max_tokens: of requests that do not say.
    """

    engine: Engine
    tokenizer: Any
    render: Callable[[Sequence[dict[str, str]]], list[int]]
    model: str
    sampling: Sampling
    max_tokens: int = 256

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
            ],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    async def completions(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=False)

    async def chat(self, http: HTTPRequest) -> Response:
        return await self._answer(http, chat=True)

    async def models(self, _: HTTPRequest) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "dspark_exp"}]}
        )

    async def health(self, _: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: HTTPRequest) -> Response:
        """Prometheus text format."""
        counts = self.engine.counts
        lines = [f"# TYPE dspark_{name}_total counter\ndspark_{name}_total {value}" for name, value in counts.items()]
        for name, value in (("running", self.engine.num_running), ("waiting", self.engine.num_waiting)):
            lines.append(f"# TYPE dspark_requests_{name} gauge\ndspark_requests_{name} {value}")
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _answer(self, http: HTTPRequest, chat: bool) -> Response:
        try:
            body = json.loads(await http.body())
            request, streams = self._read(body, chat)
        except (ValueError, TypeError, DataError) as error:
            return _error(400, str(error))
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(tokens: list[int] | None = _END) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, tokens)

        try:
            ticket = self.engine.submit(request, hand_over, on_end=hand_over)
        except DataError as error:
            return _error(400, str(error))
        except QueueFull as error:
            return _error(429, str(error), {"Retry-After": "1"})
        reply = _Reply(self, ticket, request, chat)
        if streams:
            events = self._events(reply, queue)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(http, reply, queue)

    async def _whole(self, http: HTTPRequest, reply: _Reply, queue: asyncio.Queue[list[int] | None]) -> Response:
        while True:
            try:
                tokens = await asyncio.wait_for(queue.get(), _POLL_S)
            except TimeoutError:
                if await http.is_disconnected():
                    self.engine.cancel(reply.ticket)
                continue
            if tokens is _END:
                break
        if reply.ticket.status != "finished":
            return _error(500, f"The request was {reply.ticket.status}. {reply.ticket.error}")
        return JSONResponse(reply.whole())

    async def _events(self, reply: _Reply, queue: asyncio.Queue[list[int] | None]) -> AsyncIterator[str]:
        try:
            while (tokens := await queue.get()) is not _END:
                text = reply.text_of(tokens)
                if text:
                    yield _event(reply.part(text, None))
            if reply.ticket.status == "finished":
                yield _event(reply.part("", reply.ticket.generation.finish_reason))
                yield _event(reply.part("", None, usage=True))
            else:
                yield _event({"error": {"message": f"The request was {reply.ticket.status}. {reply.ticket.error}"}})
            yield "data: [DONE]\n\n"
        finally:
            self.engine.cancel(reply.ticket)  # does nothing where it has ended

    def _read(self, body: Any, chat: bool) -> tuple[Request, bool]:
        """The engine's request.

        Raises:
            DataError: what is missing, unknown or not offered.
        """
        if not isinstance(body, dict):
            raise DataError("The body must be a JSON object.")
        if unknown := sorted(set(body) - _KNOWN):
            raise DataError(f"Not offered: {', '.join(unknown)}. Known: {', '.join(sorted(_KNOWN))}.")
        if body.get("n", 1) != 1:
            raise DataError(f"n={body['n']}: one answer a request.")
        for name in ("temperature", "top_p", "top_k"):
            own = getattr(self.sampling, name)
            if body.get(name) is not None and float(body[name]) != float(own):
                raise DataError(
                    f"{name}={body[name]}: this server samples with {name}={own} (evaluation.sampling.{name})."
                )
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_tokens
        seed = body.get("seed")
        if not isinstance(limit, int) or (seed is not None and not isinstance(seed, int)):
            raise DataError("max_tokens and seed must be whole numbers.")
        ids = self._chat_ids(body.get("messages")) if chat else self._prompt_ids(body.get("prompt"))
        seed = time.time_ns() % 2**31 if seed is None else seed
        return Request(ids, limit, seed, bool(body.get("ignore_eos"))), bool(body.get("stream"))

    def _chat_ids(self, messages: Any) -> list[int]:
        right = (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
        )
        if not right:
            raise DataError('messages must be a list of {"role": …, "content": text}, at least one.')
        try:
            return self.render(messages)
        except Exception as error:  # a chat template may refuse roles or their order, each in its own way
            raise DataError(f"The chat template refuses these messages: {error}") from error

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            if any(not 0 <= t < len(self.tokenizer) for t in prompt):
                raise DataError(f"Token ids must lie within 0..{len(self.tokenizer) - 1}.")
            return prompt
        raise DataError("prompt must be a text or a list of token ids.")


class _Reply:
    """An answer in OpenAI's shapes."""

    def __init__(self, front: Front, ticket: Ticket, request: Request, chat: bool) -> None:
        self.front, self.ticket, self.request, self.chat = front, ticket, request, chat
        self.created = int(time.time())
        self._decoder: Any = DecodeStream(skip_special_tokens=True)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete; bytes of a character that is not whole wait for the rest."""
        backend = self.front.tokenizer.backend_tokenizer
        return "".join(self._decoder.step(backend, token) or "" for token in tokens)

    def whole(self) -> dict[str, Any]:
        generation = self.ticket.generation
        text = self.front.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": generation.finish_reason, "token_ids": generation.token_ids}
        return {**self._envelope(""), "choices": [choice], "usage": self._usage(), "dspark": self._speed()}

    def part(self, text: str, finish_reason: str | None, usage: bool = False) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        choices = [] if usage else [{"index": 0, **content, "finish_reason": finish_reason}]
        more = {"usage": self._usage(), "dspark": self._speed()} if usage else {}
        return {**self._envelope(".chunk"), "choices": choices, **more}

    def _envelope(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {
            "id": f"dspark-{self.ticket.number}",
            "object": kind,
            "created": self.created,
            "model": self.front.model,
        }

    def _usage(self) -> dict[str, int]:
        prompt, new = len(self.request.prompt_ids), len(self.ticket.generation.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _speed(self) -> dict[str, float]:
        ticket = self.ticket
        return {
            "time_to_first_token_s": ticket.time_to_first_token_s,
            "tokens_per_s": ticket.tokens_per_s,
            "rounds": len(ticket.rounds),
        }


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kinds = {400: "invalid_request_error", 404: "not_found_error", 405: "not_found_error", 429: "rate_limit_error"}
    body = {"error": {"message": message, "type": kinds.get(status, "server_error"), "code": status}}
    return JSONResponse(body, status, headers)


async def _not_found(http: HTTPRequest, error: Any) -> Response:
    return _error(error.status_code, f"No {http.method} {http.url.path} here.")
