"""Replies from a small local server: ids or text, slow, failing, refusing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dspark_exp.data.completion_server import CompletionServer, Reply, ServerSettings
from dspark_exp.errors import DataError
from dspark_exp.targets import Target


class FakeServer(ThreadingHTTPServer):
    """Answers with the prompt's last id, three times; what it does wrong is set by the test."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict] = []
        self.failures_left = 0
        self.refuse_ids: set[int] = set()
        self.gives_ids, self.text, self.finish = True, "of course", "stop"
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.gate: threading.Barrier | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            failing = server.failures_left > 0
            server.failures_left -= failing
        if server.gate is not None:
            server.gate.wait(5)
        with server.lock:
            server.in_flight -= 1
        last = body["prompt"][-1]
        if failing:
            self._send(503, {"error": "busy"})
        elif last in server.refuse_ids:
            self._send(400, {"error": "context length exceeded"})
        else:
            choice = {"text": server.text, "finish_reason": server.finish}
            self._send(200, {"choices": [choice | ({"token_ids": [last] * 3} if server.gives_ids else {})]})

    def _send(self, status: int, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def _client(server: FakeServer, tiny: Target, **settings) -> CompletionServer:
    chosen = ServerSettings(server.url, **{"backoff_s": 0.01, "retries": 3, "concurrency": 4} | settings)
    stop = tiny.facts.stop_ids
    return CompletionServer(chosen, {"temperature": 0.7, "top_p": 0.8}, 16, tiny.tokenizer, stop, stop[0])


def _ask(client: CompletionServer, last_ids: list[int]) -> dict[int, Reply]:
    replies: dict[int, Reply] = {}
    client.generate([(i, [50, last]) for i, last in enumerate(last_ids)], replies.__setitem__)
    return replies


def test_prompts_go_out_as_ids_and_replies_come_back_as_ids(server: FakeServer, tiny: Target) -> None:
    end = tiny.facts.stop_ids[0]
    client = _client(server, tiny)
    assert _ask(client, [70, 71]) == {0: Reply([70] * 3 + [end], "stop"), 1: Reply([71] * 3 + [end], "stop")}
    body = next(body for body in server.bodies if body["prompt"] == [50, 71])
    assert body["model"] == "served-model"
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.7, 0.8, 16, 1)
    assert client.num_retokenized == 0


def test_a_reply_cut_by_the_limit_gets_no_end_token(server: FakeServer, tiny: Target) -> None:
    server.finish = "length"
    assert _ask(_client(server, tiny), [70]) == {0: Reply([70] * 3, "length")}


def test_text_is_tokenized_where_the_server_gives_no_ids(server: FakeServer, tiny: Target) -> None:
    server.gives_ids = False
    client = _client(server, tiny)
    (reply,) = _ask(client, [70]).values()
    assert tiny.tokenizer.decode(reply.token_ids) == "of course<|end|>"
    assert client.num_retokenized == 1


def test_failures_are_tried_again(server: FakeServer, tiny: Target) -> None:
    server.failures_left = 2
    assert len(_ask(_client(server, tiny, concurrency=1), [70])) == 1
    assert len(server.bodies) == 3


def test_requests_run_side_by_side(server: FakeServer, tiny: Target) -> None:
    server.gate = threading.Barrier(4)  # opens only when four requests are in flight
    assert len(_ask(_client(server, tiny), [70] * 8)) == 8
    assert server.most_in_flight == 4


def test_a_server_that_keeps_failing_loses_nothing_that_came(server: FakeServer, tiny: Target) -> None:
    client = _client(server, tiny, retries=1, concurrency=1)
    replies: dict[int, Reply] = {}
    client.generate([(0, [70])], replies.__setitem__)
    server.failures_left = 99
    with pytest.raises(DataError, match=r"1 of 1 requests.*What came is kept"):
        client.generate([(1, [71])], replies.__setitem__)
    assert set(replies) == {0}


def test_a_refused_request_is_no_reason_to_stop(server: FakeServer, tiny: Target) -> None:
    server.refuse_ids = {71}
    replies = _ask(_client(server, tiny), [70, 71, 72])
    assert [replies[i].finish_reason for i in range(3)] == ["stop", "refused", "stop"]


def test_an_address_without_a_server_is_named(tiny: Target) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/v1 does not answer"):
        CompletionServer(ServerSettings("http://127.0.0.1:9/v1", retries=0), {}, 4, tiny.tokenizer, (1,), 1)
