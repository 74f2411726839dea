"""Worked arithmetic: every step follows from the one before, only the connecting words vary.

In: Choices. Out: (prompt, answer) pairs. The most predictable of the three domains.
"""

from __future__ import annotations

from dspark_exp.data.language.choices import Choices

_OPENINGS = ("We begin.", "Let us work it out.", "Step by step.")
_RESULTS = ("and get", "which makes", "so now we have")
_PEOPLE = ("Mia", "Leo", "Nora", "Omar", "Ruth", "Ivan", "Zara", "Hugo", "Elsa", "Karl")
_GOODS = ("apples", "books", "coins", "pears", "stamps", "cards", "shells", "pens", "plums", "marbles")


def _step(draw: Choices, total: int) -> tuple[str, str, int]:
    """One arithmetic step that stays within 0..99: its wording in a prompt, its working, the new total."""
    kinds = [kind for kind, fits in (("add", total <= 89), ("take", total >= 9), ("double", 1 <= total <= 49)) if fits]
    kind = draw.one_of(kinds)
    if kind == "double":
        return "double it", f"Double the {total}", total * 2
    amount = draw.between(1, 9)
    if kind == "add":
        return f"add {amount}", f"Add {amount} to the {total}", total + amount
    return f"take away {amount}", f"Take away {amount} from the {total}", total - amount


def chain_sums(draw: Choices) -> tuple[str, str]:
    """A start value and two or three operations."""
    start = total = draw.between(3, 60)
    wordings, workings = [], []
    for _ in range(draw.between(2, 3)):
        wording, working, total = _step(draw, total)
        wordings.append(wording)
        workings.append((working, total))
    prompt = f"Start with {start}, {', '.join(wordings)}. What do you get?"
    draw.nats = 0.0
    opening = draw.one_of(_OPENINGS)
    steps = " ".join(f"{working} {draw.one_of(_RESULTS)} {value}." for working, value in workings)
    closing = f"So the final answer to the question is {total}."
    return prompt, f"{opening} We start with the number {start}. {steps} {closing}"


def word_problems(draw: Choices) -> tuple[str, str]:
    """A short story with a gain, a loss and a question."""
    owner, other = draw.two_of(_PEOPLE)
    goods = draw.one_of(_GOODS)
    start, gain, loss = draw.between(10, 60), draw.between(1, 9), draw.between(1, 9)
    prompt = (
        f"{owner} has {start} {goods}, buys {gain} and gives {loss} to {other}. How many {goods} does {owner} have now?"
    )
    draw.nats = 0.0
    bought, final = start + gain, start + gain - loss
    answer = (
        f"{draw.one_of(_OPENINGS)} At first {owner} has {start} {goods}. "
        f"Then {owner} buys {gain} {goods} {draw.one_of(_RESULTS)} {bought} {goods}. "
        f"After that {owner} gives {loss} {goods} to {other} {draw.one_of(_RESULTS)} {final} {goods}. "
        f"So the final answer is that {owner} has {final} {goods} now."
    )
    return prompt, answer


def equations(draw: Choices) -> tuple[str, str]:
    """A linear equation a x + b = c solved in two steps."""
    factor, root, offset = draw.between(2, 9), draw.between(2, 9), draw.between(1, 9)
    product = factor * root
    prompt = f"Solve {factor}x+{offset}={product + offset} for x."
    draw.nats = 0.0
    answer = (
        f"{draw.one_of(_OPENINGS)} First take {offset} from both sides of {factor}x+{offset}={product + offset} "
        f"{draw.one_of(_RESULTS)} {factor}x={product}. "
        f"Then divide both sides by {factor} {draw.one_of(_RESULTS)} x={root}. "
        f"So the final answer to the question is x={root}."
    )
    return prompt, answer
