"""The shapes of OpenAI's completions and chat completions: bodies read, answers written.

In: JSON bodies; tokens of a ticket. Out: engine requests; JSON answers and chunks. What this server does not offer is
refused with the reason, and accepted where a client only spells out its neutral value. Knows nothing about connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from dspark_exp.decoding import Request, Sampling
from dspark_exp.errors import DataError
from dspark_exp.serving.engine import Ticket

_KNOWN = frozenset(
    {
        "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
        "stream", "stream_options", "stop", "user", "metadata", "ignore_eos", "return_token_ids",
    }
)  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}, "tools": [], "suffix": "",
    "response_format": {"type": "text"}, "store": False,
}  # fmt: skip


@dataclass(frozen=True)
class Prompting:
    """How bodies become requests.

    Attributes:
        tokenizer: of the target. render: messages -> prompt ids.
        sampling: the engine's own; a request may repeat it but not change it.
        room: prompt ids -> new tokens of a request that does not say.
    """

    tokenizer: Any
    render: Callable[[Sequence[dict[str, str]]], list[int]]
    sampling: Sampling
    room: Callable[[list[int]], int]

    def read(self, body: Any, chat: bool) -> Asked:
        """What a body asks for.

        Raises:
            DataError: what is missing, unknown, malformed or not offered.
        """
        if not isinstance(body, dict):
            raise DataError("The body must be a JSON object.")
        body = {name: value for name, value in body.items() if value is not None}
        self._refuse_what_is_not_offered(body)
        streams = _flag(body, "stream")
        if streams and _flag(body, "return_token_ids"):
            raise DataError("return_token_ids: not offered with stream; whole answers always hold them.")
        ids = self._chat_ids(body.get("messages")) if chat else self._prompt_ids(body.get("prompt"))
        limit = _whole_number(body, "max_completion_tokens", _whole_number(body, "max_tokens", self.room(ids)))
        seed = _whole_number(body, "seed", time.time_ns() % 2**31)
        options = body.get("stream_options", {})
        if not isinstance(options, dict):
            raise DataError('stream_options must be an object, as {"include_usage": true}.')
        request = Request(ids, limit, seed, _flag(body, "ignore_eos"))
        return Asked(request, chat, streams, _flag(options, "include_usage"), _stops(body.get("stop", [])))

    def _refuse_what_is_not_offered(self, body: dict[str, Any]) -> None:
        if unknown := sorted(set(body) - _KNOWN - set(_NEUTRAL)):
            raise DataError(f"Not offered: {', '.join(unknown)}. Known: {', '.join(sorted(_KNOWN))}.")
        for name, neutral in _NEUTRAL.items():
            value = body.get(name, neutral)
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise DataError(f"Not offered: {name}={value!r}. Leave it out, or send {neutral!r}.")
        for name in ("temperature", "top_p", "top_k"):
            own = getattr(self.sampling, name)
            if name in body and _number(body, name) != float(own):
                raise DataError(
                    f"{name}={body[name]}: this server samples with {name}={own} (evaluation.sampling.{name})."
                )

    def _chat_ids(self, messages: Any) -> list[int]:
        if not isinstance(messages, list) or not messages:
            raise DataError(_MESSAGES)
        turns = [_turn(message) for message in messages]
        try:
            return self.render(turns)
        except Exception as error:  # a chat template may refuse roles or their order, each in its own way
            raise DataError(f"The chat template refuses these messages: {error}") from error

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return prompt
        raise DataError("prompt must be a text or a list of token ids.")


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it, and how its answer is wanted. ``stops``: texts that end the answer."""

    request: Request
    chat: bool
    streams: bool
    include_usage: bool
    stops: tuple[str, ...]


class Reply:
    """An answer on its way: the text of its tokens, up to a stop text, in OpenAI's shapes.

    Attributes:
        token_ids: of the answer, those of the stop text included. stopped: whether a stop text came.
    """

    def __init__(self, model: str, tokenizer: Any, ticket: Ticket, asked: Asked) -> None:
        self.model, self.ticket, self.asked = model, ticket, asked
        self.token_ids: list[int] = []
        self.stopped = False
        self._tokenizer, self._created, self._begun = tokenizer, int(time.time()), False
        self._decoder: Any = DecodeStream(skip_special_tokens=True)
        self._held = ""  # may be the beginning of a stop text

    def text_of(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete. What is not a whole character, or may become a stop text, waits."""
        backend = self._tokenizer.backend_tokenizer
        text, self._held = self._held, ""
        for token in () if self.stopped else tokens:
            self.token_ids.append(token)
            text += self._decoder.step(backend, token) or ""
            if (end := _first_stop(text, self.asked.stops)) is not None:
                self.stopped = True
                return text[:end]
        kept = len(text) - _pending(text, self.asked.stops)
        self._held = text[kept:]
        return text[:kept]

    def rest(self) -> str:
        """What waited for a stop text that did not come."""
        text, self._held = self._held, ""
        return text

    @property
    def finish_reason(self) -> str:
        return "stop" if self.stopped else self.ticket.generation.finish_reason

    def whole(self) -> dict[str, Any]:
        """The answer in one; bytes at its end that are no whole character show as such."""
        text = self._tokenizer.decode(self.token_ids, skip_special_tokens=True)
        text = text[: _first_stop(text, self.asked.stops)] if self.stopped else text
        content = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": self.finish_reason, "token_ids": self.token_ids}
        return {**self._envelope(""), "choices": [choice], "usage": self._usage(), "dspark": self._speed()}

    def part(self, text: str) -> dict[str, Any]:
        """A chunk with more text."""
        return {**self._envelope(".chunk"), "choices": [self._chunk(text, None)]}

    def last_parts(self) -> list[dict[str, Any]]:
        """The chunk with the reason of the end, and the usage where the client asked for it."""
        ends = {**self._envelope(".chunk"), "choices": [self._chunk("", self.finish_reason)], "dspark": self._speed()}
        if not self.asked.include_usage:
            return [ends]
        return [ends, {**self._envelope(".chunk"), "choices": [], "usage": self._usage()}]

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        if not self.asked.chat:
            return {"index": 0, "text": text, "finish_reason": finish_reason}
        role, self._begun = {} if self._begun else {"role": "assistant"}, True
        return {"index": 0, "delta": {**role, "content": text}, "finish_reason": finish_reason}

    def _envelope(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.asked.chat else "text_completion"
        return {"id": f"dspark-{self.ticket.number}", "object": kind, "created": self._created, "model": self.model}

    def _usage(self) -> dict[str, int]:
        prompt, new = len(self.ticket.request.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _speed(self) -> dict[str, float]:
        ticket = self.ticket
        return {
            "time_to_first_token_s": ticket.time_to_first_token_s,
            "tokens_per_s": ticket.tokens_per_s,
            "rounds": len(ticket.rounds),
        }


_MESSAGES = 'messages must be a list of {"role": …, "content": text}, at least one.'


def _turn(message: Any) -> dict[str, str]:
    """A message with its text; content may come as text parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(_MESSAGES)
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{_MESSAGES} Content may be a list of text parts; images and sound are not offered.")
    return {"role": message["role"], "content": content}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise DataError("stop must be a text or a list of texts, none of them empty.")
    return tuple(stops)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _pending(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that begins a stop text."""
    lengths = (n for stop in stops for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise DataError(f"{name}={value!r}: expected true or false.")
    return value


def _whole_number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{name}={value!r}: expected a whole number.")
    return value


def _number(body: dict[str, Any], name: str) -> float:
    value = body[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise DataError(f"{name}={value!r}: expected a number.")
    return float(value)
