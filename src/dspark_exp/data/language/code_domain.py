"""Small Python functions: free choice of a name, which is then copied through fixed idioms.

In: Choices. Out: (prompt, answer) pairs. Names differ in length, so that a name also moves what follows.
"""

from __future__ import annotations

from dspark_exp.data.language.choices import Choices

_PAIRS = (("left", "right"), ("first_value", "second_value"), ("a", "b"), ("base", "extra"))
_RESULTS = ("total", "result", "final_value", "out")
_OPERATIONS = {
    "sum": ("add", "+"),
    "difference": ("subtract", "-"),
    "product": ("multiply", "*"),
    "quotient": ("divide", "/"),
    "remainder": ("reduce", "%"),
    "power": ("raise", "**"),
}
_TYPES = (
    "numbers", "prices", "weights", "lengths", "scores", "ages", "levels", "speeds",
    "angles", "costs", "depths", "grades", "heights", "values", "widths", "points",
)  # fmt: skip
_REQUESTS = ("Write", "Please write", "Show me", "I need", "Can you give me", "Help me with")
_ITEMS = ("item", "current_item", "x", "entry")
_FILTERS = {
    "positive": "{} > 0",
    "negative": "{} < 0",
    "even": "{} % 2 == 0",
    "odd": "{} % 2 == 1",
    "nonzero": "{} != 0",
}
_CLASSES = ("Point", "Account", "Garden", "Parcel", "Robot", "Ticket", "Engine", "Market", "Bottle", "Planet")
_FIELDS = ("name", "size", "owner", "weight", "color", "price", "speed", "height", "label", "count")
_INTROS = ("Here is the code:\n", "Sure, this will do:\n", "You can write\n")


def functions(draw: Choices) -> tuple[str, str]:
    """A function of two arguments with a documentation line."""
    operation = draw.one_of(tuple(_OPERATIONS))
    things = draw.one_of(_TYPES)
    verb, symbol = _OPERATIONS[operation]
    prompt = f"{draw.one_of(_REQUESTS)} a function for the {operation} of two {things}."
    draw.nats = 0.0
    left, right = draw.one_of(_PAIRS)
    result = draw.one_of(_RESULTS)
    answer = (
        f"{draw.one_of(_INTROS)}def {verb}_{things}({left}, {right}):\n"
        f"    # the {operation} of {left} and {right}\n"
        f"    {result} = {left} {symbol} {right}\n    return {result}"
    )
    return prompt, answer


def loops(draw: Choices) -> tuple[str, str]:
    """A loop that keeps what fits a condition."""
    kind, things = draw.one_of(tuple(_FILTERS)), draw.one_of(_TYPES)
    prompt = f"{draw.one_of(_REQUESTS)} a loop that keeps the {kind} {things}."
    draw.nats = 0.0
    item, kept = draw.one_of(_ITEMS), draw.one_of(("kept", "selected_values", "found"))
    answer = (
        f"{draw.one_of(_INTROS)}{kept} = []\nfor {item} in {things}:\n"
        f"    if {_FILTERS[kind].format(item)}:\n        {kept}.append({item})\nprint({kept})"
    )
    return prompt, answer


def classes(draw: Choices) -> tuple[str, str]:
    """A class with two fields and a method that describes it."""
    name, (first, second) = draw.one_of(_CLASSES), draw.two_of(_FIELDS)
    prompt = f"{draw.one_of(_REQUESTS)} a class {name} with {first} and {second}."
    draw.nats = 0.0
    method = draw.one_of(("describe", "to_text", "show_me"))
    answer = (
        f"{draw.one_of(_INTROS)}class {name}:\n    def __init__(self, {first}, {second}):\n"
        f"        self.{first} = {first}\n        self.{second} = {second}\n\n"
        f"    def {method}(self):\n        return (self.{first}, self.{second})"
    )
    return prompt, answer
