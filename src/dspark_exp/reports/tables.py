"""Averages, gains and intervals out of result rows; the table printed at the end of a run.

In: rows of results.json. Out: numbers by drafter and domain. Knows nothing about how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_exp.metrics import interval, resampled_ratios

Row = dict[str, Any]
DOMAIN_ORDER = ("math", "code", "chat")


MIN_ROUNDS = 30


@dataclass(frozen=True)
class Average:
    """A macro-average over benchmarks with its 95% bootstrap interval over prompts."""

    tau: float
    low: float
    high: float
    resampled: np.ndarray


@dataclass(frozen=True)
class Pooled:
    """Positions of a domain pooled over its benchmarks; ``low`` and ``high`` are Wilson 95% intervals."""

    tau: float
    conditional: list[float | None]
    low: list[float | None]
    high: list[float | None]
    counts: list[int]

    @property
    def shown(self) -> list[float | None]:
        """``conditional`` where at least ``MIN_ROUNDS`` rounds got that far; elsewhere it is noise, hence None."""
        return [v if n >= MIN_ROUNDS else None for v, n in zip(self.conditional, self.counts, strict=True)]


def in_order(values: Iterable[str], order: Sequence[str]) -> list[str]:
    """Distinct values, known ones first in the given order."""
    distinct = list(dict.fromkeys(values))
    return [v for v in order if v in distinct] + [v for v in distinct if v not in order]


def macro_average(rows: Sequence[Row]) -> Average:
    """Mean of tau over benchmarks; every benchmark is resampled by itself."""
    resampled = np.mean(
        [
            resampled_ratios(np.array(row["emitted_by_prompt"]), np.array(row["rounds_by_prompt"]), seed=index)
            for index, row in enumerate(rows)
        ],
        axis=0,
    )
    low, high = interval(resampled)
    return Average(float(np.mean([row["tau"] for row in rows])), low, high, resampled)


def macro_averages(rows: Sequence[Row]) -> dict[str, Average]:
    """By domain, and ``all``: the mean over all benchmarks."""
    domains = in_order((row["domain"] for row in rows), DOMAIN_ORDER)
    averages = {domain: macro_average([row for row in rows if row["domain"] == domain]) for domain in domains}
    return averages | {"all": macro_average(rows)}


def gain(ours: Average, baseline: Average) -> tuple[float, float, float]:
    """Relative gain of ``ours`` over ``baseline`` and its 95% interval. The same prompts are resampled together."""
    low, high = interval(ours.resampled / baseline.resampled - 1)
    return ours.tau / baseline.tau - 1, low, high


def pooled_by_domain(rows: Sequence[Row]) -> dict[str, Pooled]:
    """Conditional acceptance by position, accepted and reached rounds summed over a domain's benchmarks."""
    pooled = {}
    for domain in in_order((row["domain"] for row in rows), DOMAIN_ORDER):
        group = [row for row in rows if row["domain"] == domain]
        reached = np.array([row["position_counts"] for row in group], dtype=float)
        rates = np.array([[0.0 if v is None else v for v in row["conditional_acceptance"]] for row in group])
        total = reached.sum(0)
        accepted = (reached * rates).sum(0)
        low, high = _wilson(accepted, total)
        seen = total > 0
        pooled[domain] = Pooled(
            tau=sum(row["emitted_tokens"] for row in group) / max(1, sum(row["rounds"] for row in group)),
            conditional=[float(a / t) if s else None for a, t, s in zip(accepted, total, seen, strict=True)],
            low=[float(v) if s else None for v, s in zip(low, seen, strict=True)],
            high=[float(v) if s else None for v, s in zip(high, seen, strict=True)],
            counts=[int(t) for t in total],
        )
    return pooled


def by_drafter(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows grouped by drafter, in a fixed order."""
    names = in_order(
        (row["drafter"] for row in rows), ("eagle3", "dflash", "dspark_markov", "dspark_gated", "dspark_rnn")
    )
    return {name: [row for row in rows if row["drafter"] == name] for name in names}


def print_table(report: dict[str, Any]) -> None:
    """Accepted length by benchmark and drafter, with macro-averages, on the terminal."""
    groups = by_drafter(report["rows"])
    tau = {(drafter, row["benchmark"]): row for drafter, rows in groups.items() for row in rows}
    averages = {drafter: macro_averages(rows) for drafter, rows in groups.items()}
    table = Table(title=f"Accepted length per round (tau, 95% interval): {report['experiment']} on {report['target']}")
    table.add_column("benchmark")
    for drafter in groups:
        table.add_column(drafter, justify="right")
    domain_of = {row["benchmark"]: row["domain"] for row in report["rows"]}
    for name, domain in domain_of.items():
        cells = [tau.get((drafter, name)) for drafter in groups]
        texts = ["-" if c is None else f"{c['tau']:.2f} [{c['tau_low']:.2f}, {c['tau_high']:.2f}]" for c in cells]
        table.add_row(f"{name} ({domain})", *texts)
    table.add_section()
    for name in macro_averages(report["rows"]):
        means = [averages[drafter].get(name) for drafter in groups]
        texts = ["-" if m is None else f"{m.tau:.2f} [{m.low:.2f}, {m.high:.2f}]" for m in means]
        table.add_row(f"mean {name}", *texts, style="bold")
    Console().print(table)


def _wilson(accepted: np.ndarray, total: np.ndarray, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    n = np.maximum(total, 1)
    p = accepted / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return centre - half, centre + half
