"""Replies from an OpenAI-compatible server: concurrent, with retries and backoff.

In: prompts as token ids. Out: replies as token ids, handed over as they come. Prompts are sent as token ids to
``/completions`` (vLLM, SGLang, llama.cpp and TensorRT-LLM take them), so that the server's own chat template cannot
differ from the one that training uses. Knows nothing about files or conversations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from threading import local
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from dspark_exp.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """``finish_reason``: stop, length (cut by the token limit), or refused (the server takes no such request)."""

    token_ids: list[int]
    finish_reason: str


OnReply = Callable[[int, Reply], None]


@dataclass(frozen=True)
class ServerSettings:
    """``url`` ends in /v1; ``model`` null = the first one that the server lists; ``retries`` per request."""

    url: str
    model: str | None = None
    concurrency: int = 32
    retries: int = 6
    backoff_s: float = 0.5
    timeout_s: float = 600.0


class CompletionServer:
    """One server, one model, one sampling setting.

    Args:
        settings: where it is and how hard to try.
        sampling: request fields such as temperature, top_p, top_k.
        max_new_tokens: token limit of a reply.
        tokenizer: turns text into ids where the server returns no ids.
        stop_ids: end tokens; turn_end: the one a finished reply ends with.

    Raises:
        DataError: the server cannot be reached or lists no model.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sampling: dict[str, Any],
        max_new_tokens: int,
        tokenizer: Any,
        stop_ids: Collection[int],
        turn_end: int,
    ) -> None:
        self._settings, self._sampling, self._max_new_tokens = settings, sampling, max_new_tokens
        self._tokenizer, self._stop_ids, self._turn_end = tokenizer, frozenset(stop_ids), turn_end
        self._local = local()
        self.num_retokenized = 0
        self.model = settings.model or self._first_model()

    def generate(self, prompts: Sequence[tuple[int, list[int]]], on_reply: OnReply) -> None:
        """Reply to (seed, prompt ids); ``on_reply(position, reply)`` runs in this thread as each one ends.

        Raises:
            DataError: requests still failed after all retries; everything that came is handed over before.
        """
        failures: list[str] = []
        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            jobs = {pool.submit(self._ask, seed, ids): position for position, (seed, ids) in enumerate(prompts)}
            for job in as_completed(jobs):
                try:
                    on_reply(jobs[job], job.result())
                except requests.RequestException as error:
                    failures.append(f"{type(error).__name__}: {error}")
        if failures:
            raise DataError(
                f"{len(failures)} of {len(prompts)} requests to {self._settings.url} failed after "
                f"{self._settings.retries} retries ({failures[-1]}). What came is kept; run again to ask for the rest."
            )

    def _ask(self, seed: int, prompt_ids: list[int]) -> Reply:
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": self._max_new_tokens,
            "seed": seed,
            "return_token_ids": True,  # vLLM; others ignore it and text is tokenized here
            **self._sampling,
        }
        answer = self._session.post(f"{self._settings.url}/completions", json=body, timeout=self._settings.timeout_s)
        if 400 <= answer.status_code < 500:
            log.warning("%s refused a request: %s", self._settings.url, answer.text[:200])
            return Reply([], "refused")
        answer.raise_for_status()
        return self._reply(answer.json()["choices"][0])

    def _reply(self, choice: dict[str, Any]) -> Reply:
        ids = choice.get("token_ids")
        if ids is None:
            self.num_retokenized += 1
            ids = self._tokenizer(choice.get("text") or "", add_special_tokens=False)["input_ids"]
        ids = list(ids)
        finished = choice.get("finish_reason") == "stop"
        while ids and ids[-1] in self._stop_ids:
            ids.pop()
        return Reply([*ids, self._turn_end] if finished else ids, "stop" if finished else "length")

    def _first_model(self) -> str:
        url = f"{self._settings.url}/models"
        try:
            answer = self._session.get(url, timeout=30)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (requests.RequestException, KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"data.server={self._settings.url} does not answer at /models ({type(error).__name__}): give the URL "
                "of an OpenAI-compatible server, /v1 included, or name its model with data.server_model."
            ) from error

    @property
    def _session(self) -> requests.Session:
        """One session a thread; connections are kept, failures retried with growing pauses."""
        if not hasattr(self._local, "session"):
            retry = Retry(
                total=self._settings.retries,
                backoff_factor=self._settings.backoff_s,
                status_forcelist=(429, 500, 502, 503, 504),
                allowed_methods=None,  # also POST: a completion has no side effect
            )
            session = requests.Session()
            session.mount("http://", HTTPAdapter(max_retries=retry))
            session.mount("https://", HTTPAdapter(max_retries=retry))
            self._local.session = session
        return self._local.session
