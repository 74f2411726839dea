"""An OpenAI-compatible front of the engine: completions and chat completions with streaming, models, metrics.

In: HTTP requests. Out: JSON, server-sent events. A bad request gets a JSON error, a full queue 429, and a client that
goes away frees its row. Knows nothing about drafting.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dspark_exp.errors import DataError
from dspark_exp.serving.engine import Engine, QueueFull
from dspark_exp.serving.openai import Prompting, Reply

_POLL_S = 0.2
_STARTED = time.time()
_END = None


@dataclass(frozen=True)
class Front:
    """What the endpoints need.

    Attributes:
        engine: started by the caller.
        prompting: how bodies become requests.
        model: the name that /v1/models lists.
    """

    engine: Engine
    prompting: Prompting
    model: str

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
        model = {"id": self.model, "object": "model", "created": int(_STARTED), "owned_by": "dspark_exp"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: HTTPRequest) -> Response:
        """Prometheus text format."""
        counts = self.engine.counts
        lines = [f"# TYPE dspark_{name}_total counter\ndspark_{name}_total {value}" for name, value in counts.items()]
        for name, value in (("running", self.engine.num_running), ("waiting", self.engine.num_waiting)):
            lines.append(f"# TYPE dspark_requests_{name} gauge\ndspark_requests_{name} {value}")
        name = "dspark_time_to_first_token_seconds"
        lines.append(f"# TYPE {name} summary\n{name}_sum {self.engine.waited_s}\n{name}_count {counts['answers']}")
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _answer(self, http: HTTPRequest, chat: bool) -> Response:
        try:
            asked = self.prompting.read(json.loads(await http.body()), chat)
        except (ValueError, DataError) as error:
            return _error(400, str(error))
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(tokens: list[int] | None = _END) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, tokens)

        try:
            ticket = self.engine.submit(asked.request, hand_over, on_end=hand_over)
        except DataError as error:
            return _error(400, str(error))
        except QueueFull as error:
            return _error(429, str(error), {"Retry-After": "1"})
        reply = Reply(self.model, self.prompting.tokenizer, ticket, asked)
        if asked.streams:
            events = self._events(reply, queue)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(http, reply, queue)

    async def _whole(self, http: HTTPRequest, reply: Reply, queue: asyncio.Queue[list[int] | None]) -> Response:
        tokens: list[int] | None = []
        looked = time.monotonic()
        while tokens is not _END:
            reply.text_of(tokens)
            if reply.stopped:
                self.engine.finish(reply.ticket)
            if time.monotonic() - looked >= _POLL_S:
                looked = time.monotonic()
                if await http.is_disconnected():
                    self.engine.cancel(reply.ticket)
            try:
                tokens = await asyncio.wait_for(queue.get(), _POLL_S)
            except TimeoutError:
                tokens = []
        if reply.ticket.status != "finished":
            return _error(500, f"The request was {reply.ticket.status}. {reply.ticket.error}")
        return JSONResponse(reply.whole())

    async def _events(self, reply: Reply, queue: asyncio.Queue[list[int] | None]) -> AsyncIterator[str]:
        try:
            while (tokens := await queue.get()) is not _END:
                if text := reply.text_of(tokens):
                    yield _event(reply.part(text))
                if reply.stopped:
                    self.engine.finish(reply.ticket)
            if reply.ticket.status == "finished":
                if text := reply.rest():
                    yield _event(reply.part(text))
                for part in reply.last_parts():
                    yield _event(part)
            else:
                yield _event({"error": {"message": f"The request was {reply.ticket.status}. {reply.ticket.error}"}})
            yield "data: [DONE]\n\n"
        finally:
            self.engine.cancel(reply.ticket)  # does nothing where it has ended


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kinds = {400: "invalid_request_error", 404: "not_found_error", 405: "not_found_error", 429: "rate_limit_error"}
    body = {"error": {"message": message, "type": kinds.get(status, "server_error"), "code": status}}
    return JSONResponse(body, status, headers)


async def _not_found(http: HTTPRequest, error: Any) -> Response:
    return _error(error.status_code, f"No {http.method} {http.url.path} here.")
