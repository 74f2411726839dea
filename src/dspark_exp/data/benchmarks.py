"""Prompts by benchmark: the synthetic language, JSONL files, or the hub.

In: names, folders, counts. Out: prompts. Knows nothing about tokenizers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark_exp.data import language
from dspark_exp.data.rendering import Message
from dspark_exp.data.sources import read_jsonl
from dspark_exp.errors import ConfigError, DataError

_SHUFFLE_SEED = 980406  # the reference's, so that the first n prompts are the same prompts


@dataclass(frozen=True)
class Prompt:
    """The messages a target answers, first turn only for benchmarks."""

    messages: tuple[Message, ...]
    domain: str
    benchmark: str


@dataclass(frozen=True)
class HubSource:
    """A benchmark on the hub: data set id, optional configuration, split, prompt field, text put after the prompt."""

    id: str
    split: str
    field: str
    config: str | None = None
    suffix: str = ""


@dataclass(frozen=True)
class BenchmarkSpec:
    """One benchmark: its domain and where its prompts are. ``hub`` null = a synthetic benchmark or a file."""

    domain: str
    hub: HubSource | None = None
    num_prompts: int | None = field(default=None)


def synthetic_prompts(names: Sequence[str], split: str, num_prompts: int) -> dict[str, list[Prompt]]:
    """Prompts of the synthetic language, ``num_prompts`` for each benchmark; no prompt occurs twice."""
    found: dict[str, list[Prompt]] = {}
    for name in names:
        seen: dict[str, Prompt] = {}
        for index in range(num_prompts * 40):
            item = language.sample(name, split, index)
            seen.setdefault(item.prompt, Prompt(({"role": "user", "content": item.prompt},), item.domain, name))
            if len(seen) == num_prompts:
                break
        found[name] = list(seen.values())
    return found


def benchmark_prompts(
    specs: Mapping[str, BenchmarkSpec], folder: str | None, num_prompts: int, held_out: int | None = None
) -> dict[str, list[Prompt]]:
    """First turns of each benchmark from ``<folder>/<name>.jsonl``, or from the hub where no folder is given.

    Args:
        held_out: take this many prompts that come after the ``num_prompts`` instead; a benchmark without any is left
            out.

    Raises:
        DataError: a file or data set is missing or holds no prompt; the message names all that are missing.
    """
    if folder is not None:
        missing = [name for name in specs if not (Path(folder) / f"{name}.jsonl").is_file()]
        if missing:
            raise DataError(
                f"benchmark.dir={folder} has no file for {', '.join(missing)}: expected <name>.jsonl with one "
                '{"turns": [...]} a line.'
            )
    found = {}
    for name, spec in specs.items():
        count = min(num_prompts, spec.num_prompts or num_prompts)
        turns = _file_turns(Path(folder) / f"{name}.jsonl") if folder is not None else _hub_turns(name, spec)
        random.Random(_SHUFFLE_SEED).shuffle(turns)
        chosen = turns[:count] if held_out is None else turns[count : count + held_out]
        found[name] = [Prompt(({"role": "user", "content": text},), spec.domain, name) for text in chosen]
        if not found[name] and held_out is not None:
            del found[name]
        elif not found[name]:
            raise DataError(f"Benchmark {name} holds no prompt.")
    return found


def _file_turns(path: Path) -> list[str]:
    turns = []
    for row in read_jsonl(path):
        if isinstance(row, ValueError):
            raise DataError(f"{path} {row}: not JSON.")
        if isinstance(row, dict) and row.get("turns"):
            if not isinstance(row["turns"], list) or not isinstance(row["turns"][0], str):
                raise DataError(f'{path}: {str(row)[:80]} … is no prompt; expected {{"turns": ["text", ...]}}.')
            turns.append(row["turns"][0])
    return turns


def _hub_turns(name: str, spec: BenchmarkSpec) -> list[str]:
    if spec.hub is None:
        raise ConfigError(f"Benchmark {name} has no hub source; give benchmark.dir=<folder with {name}.jsonl>.")
    from datasets import load_dataset  # slow import, needed on this path alone

    source = spec.hub
    try:
        rows = load_dataset(source.id, source.config, split=source.split)
    except Exception as error:  # the hub client raises many kinds; all mean that the data cannot be had
        raise DataError(
            f"Benchmark {name} could not be loaded from the hub ({source.id}): {type(error).__name__}. "
            "Give benchmark.dir=<folder with JSONL files> to use local prompts."
        ) from error
    values = [row[source.field] for row in rows]
    return [str(value[0] if isinstance(value, list) else value) + source.suffix for value in values]
