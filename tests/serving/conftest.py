"""A real server in a thread, for tests that stand on its other side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import DecodingBatch, Full, Sampling
from dspark_exp.serving import Engine
from dspark_exp.serving.http import Front
from dspark_exp.serving.openai import Prompting
from dspark_exp.targets import Target
from tests.conftest import make_cache, make_drafter


class Server:
    """A front on a free port. ``url`` ends in /v1."""

    def __init__(self, target: Target, rows: int = 4, max_queue: int = 8) -> None:
        drafter = make_drafter("dspark_markov", target)
        batch = DecodingBatch(target, drafter, make_cache, Sampling(1.0), Full(), rows, 160)
        self.engine = Engine(batch, max_queue)
        prompting = Prompting(
            target.tokenizer,
            lambda messages: render_prompt(target.tokenizer, messages),
            Sampling(1.0),
            self.engine.room,
        )
        front = Front(self.engine, prompting, "tiny")
        self._server = uvicorn.Server(uvicorn.Config(front.app(), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.engine.start()
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.root = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.url = f"{self.root}/v1"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.engine.stop()


@pytest.fixture(scope="module")
def server(tiny: Target) -> Iterator[Server]:
    server = Server(tiny)
    yield server
    server.close()
