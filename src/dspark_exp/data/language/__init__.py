"""The synthetic three-domain language of the embedded target.

In: a benchmark's name, a split and an index. Out: one conversation with the exact information content
of its answer. Knows nothing about tokenizers or models. No prompt occurs in two splits: its checksum decides the split.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dspark_exp.data.language import chat_domain, code_domain, math_domain
from dspark_exp.data.language.choices import Choices
from dspark_exp.errors import ConfigError

DOMAINS: dict[str, dict[str, Callable[[Choices], tuple[str, str]]]] = {
    "math": {
        "chain_sums": math_domain.chain_sums,
        "word_problems": math_domain.word_problems,
        "equations": math_domain.equations,
    },
    "code": {
        "functions": code_domain.functions,
        "loops": code_domain.loops,
        "classes": code_domain.classes,
    },
    "chat": {
        "thanks": chat_domain.thanks,
        "advice": chat_domain.advice,
        "small_talk": chat_domain.small_talk,
    },
}
BENCHMARKS: dict[str, str] = {name: domain for domain, group in DOMAINS.items() for name in group}
SPLITS: dict[str, range] = {"train": range(0, 8), "validation": range(8, 9), "evaluation": range(9, 10)}
_NUM_BUCKETS = 10


@dataclass(frozen=True)
class Sample:
    """One conversation; ``answer_nats`` = -log p(answer | prompt) under the generator."""

    domain: str
    benchmark: str
    prompt: str
    answer: str
    answer_nats: float


def sample(benchmark: str, split: str, index: int) -> Sample:
    """The ``index``-th conversation of a benchmark's split; the same for the same arguments, everywhere.

    Raises:
        ConfigError: unknown benchmark or split.
    """
    if benchmark not in BENCHMARKS:
        raise ConfigError(f"Unknown synthetic benchmark {benchmark!r}; choose from {', '.join(BENCHMARKS)}.")
    if split not in SPLITS:
        raise ConfigError(f"Unknown split {split!r}; choose from {', '.join(SPLITS)}.")
    domain = BENCHMARKS[benchmark]
    attempt = 0
    while True:
        draw = Choices(f"{split}/{benchmark}/{index}/{attempt}")
        prompt, answer = DOMAINS[domain][benchmark](draw)
        if zlib.crc32(prompt.encode()) % _NUM_BUCKETS in SPLITS[split]:
            return Sample(domain, benchmark, prompt, answer, draw.nats)
        attempt += 1


def samples(split: str, num_per_benchmark: int, first: int = 0) -> Iterator[Sample]:
    """Round robin over all nine benchmarks, so that any prefix is balanced."""
    for index in range(first, first + num_per_benchmark):
        for benchmark in BENCHMARKS:
            yield sample(benchmark, split, index)
