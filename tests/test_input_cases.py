"""The page of input cases names tests that exist, for every case."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16, 17, 18, 20, 21, 22, 23, 24, 27, 28, 30, 31, 32, 33)


def test_every_input_case_names_tests_that_exist() -> None:
    page = (TESTS / "input_cases.md").read_text()
    defined = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    rows = {
        int(number): line
        for line in page.splitlines()
        if (number := line.split("|")[1].strip() if "|" in line else "").isdigit()
    }
    assert tuple(sorted(rows)) == CASES
    for number, line in rows.items():
        named = re.findall(r"`(test_\w+)`", line)
        assert named or "annot arise" in line, f"case {number} names no test"
        assert set(named) <= defined, f"case {number} names tests that are gone: {set(named) - defined}"
