"""The synthetic language: reproducible, split without overlap, with the information content it claims."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from dspark_exp.data import language
from dspark_exp.data.language.choices import Choices
from dspark_exp.errors import ConfigError


def test_a_sample_is_the_same_everywhere() -> None:
    assert language.sample("equations", "train", 5) == language.sample("equations", "train", 5)


def test_no_prompt_occurs_in_two_splits() -> None:
    prompts = {split: {s.prompt for s in language.samples(split, 60)} for split in language.SPLITS}
    assert not prompts["train"] & prompts["evaluation"]
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["validation"] & prompts["evaluation"]


def test_arithmetic_is_right() -> None:
    for index in range(50):
        item = language.sample("equations", "train", index)
        factor, rest = item.prompt.removeprefix("Solve ").removesuffix(" for x.").split("x+")
        offset, total = rest.split("=")
        root = item.answer.rstrip(".").split("x=")[-1]
        assert int(factor) * int(root) + int(offset) == int(total)


@pytest.mark.parametrize("benchmark", list(language.BENCHMARKS))
def test_information_of_an_answer_matches_how_often_it_is_drawn(benchmark: str) -> None:
    """Among answers to one prompt, -log frequency averages to the stated nats."""
    function = language.DOMAINS[language.BENCHMARKS[benchmark]][benchmark]
    stated = Counter()
    for index in range(300):
        draw = Choices(f"check/{index}")
        _, answer = function(draw)
        stated[round(draw.nats, 6)] += 1
        assert draw.nats > 0
        assert math.exp(draw.nats) >= 2
        assert answer
    # answers of a benchmark differ in length only by the number of steps: few distinct values
    assert len(stated) <= 3


def test_two_draws_with_different_choices_never_write_the_same_answer() -> None:
    """The text determines the choices, which is what makes the stated entropy exact."""
    for benchmark, domain in language.BENCHMARKS.items():
        texts: dict[tuple[str, str], float] = {}
        for index in range(2000):
            draw = Choices(f"text/{index}")
            prompt, answer = language.DOMAINS[domain][benchmark](draw)
            nats = texts.setdefault((prompt, answer), draw.nats)
            assert nats == pytest.approx(draw.nats)


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="chain_sums"):
        language.sample("gsm8k", "train", 0)
    with pytest.raises(ConfigError, match="validation"):
        language.sample("equations", "test", 0)
