"""Worked arithmetic: every step follows from the one before, only the connecting words vary.

In: Choices. Out: (prompt, answer) pairs. The most predictable of the three domains.
"""

from __future__ import annotations

from dspark_exp.data.language.choices import Choices

_OPENINGS = ("We begin.", "Let us work it out.", "Step by step.")
_CONNECTORS = ("Then", "And after that", "Next we get")
_CLOSINGS = ("So the answer is", "The result is")
_PEOPLE = ("Mia", "Leo", "Nora", "Omar", "Ruth", "Ivan", "Zara", "Hugo", "Elsa", "Karl")
_GOODS = ("apples", "books", "coins", "pears", "stamps", "cards", "shells", "pens", "plums", "marbles")


def _step(draw: Choices, total: int) -> tuple[str, str, int]:
    """One arithmetic step that stays within 0..99: its wording in a prompt, its working, the new total."""
    kinds = [kind for kind, fits in (("add", total <= 89), ("take", total >= 9), ("double", 1 <= total <= 49)) if fits]
    kind = draw.one_of(kinds)
    if kind == "double":
        return "double it", f"{total}*2={total * 2}.", total * 2
    amount = draw.between(1, 9)
    if kind == "add":
        return f"add {amount}", f"{total}+{amount}={total + amount}.", total + amount
    return f"take away {amount}", f"{total}-{amount}={total - amount}.", total - amount


def chain_sums(draw: Choices) -> tuple[str, str]:
    """A start value and three or four operations."""
    start = total = draw.between(3, 60)
    wordings, workings = [], []
    for _ in range(draw.between(3, 4)):
        wording, working, total = _step(draw, total)
        wordings.append(wording)
        workings.append(working)
    prompt = f"Start with {start}, {', '.join(wordings)}. What do you get?"
    draw.nats = 0.0
    lines = [draw.one_of(_OPENINGS)]
    for index, working in enumerate(workings):
        lines.append(working if index == 0 else f"{draw.one_of(_CONNECTORS)} {working}")
    return prompt, " ".join([*lines, f"{draw.one_of(_CLOSINGS)} {total}."])


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
        f"{draw.one_of(_OPENINGS)} {owner} has {start} {goods}. {draw.one_of(_CONNECTORS)} {start}+{gain}={bought}. "
        f"{draw.one_of(_CONNECTORS)} {bought}-{loss}={final}. {draw.one_of(_CLOSINGS)} {final} {goods}."
    )
    return prompt, answer


def equations(draw: Choices) -> tuple[str, str]:
    """A linear equation a x + b = c solved in two steps."""
    factor, root, offset = draw.between(2, 9), draw.between(2, 9), draw.between(1, 9)
    product = factor * root
    prompt = f"Solve {factor}x+{offset}={product + offset} for x."
    draw.nats = 0.0
    answer = (
        f"{draw.one_of(_OPENINGS)} Take {offset} from both sides: {factor}x={product + offset}-{offset}={product}. "
        f"{draw.one_of(_CONNECTORS)} divide by {factor}: x={product}/{factor}={root}. "
        f"{draw.one_of(_CLOSINGS)} x={root}."
    )
    return prompt, answer
