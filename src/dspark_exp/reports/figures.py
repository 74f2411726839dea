"""Figures of a report: conditional acceptance by position, and learning curves.

In: results. Out: PNG files. Colours are fixed per drafter across all figures (Okabe-Ito, colour-blind-safe).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dspark_exp.reports.tables import MIN_ROUNDS, by_drafter, pooled_by_domain

COLORS = {
    "eagle3": "#E69F00",
    "dflash": "#0072B2",
    "dspark_markov": "#D55E00",
    "dspark_rnn": "#009E73",
    "dspark_gated": "#CC79A7",
}
MARKERS = {"eagle3": "s", "dflash": "o", "dspark_markov": "D", "dspark_rnn": "^", "dspark_gated": "v"}
_EXTRA = ("#56B4E9", "#999999", "#000000")


_Labels = tuple[Axes, list[tuple[float, str]], float]


def color_of(drafter: str) -> str:
    """The drafter's colour; unknown drafters share a few more in a stable order."""
    return COLORS.get(drafter, _EXTRA[sum(drafter.encode()) % len(_EXTRA)])


def position_figure(report: dict[str, Any], path: Path) -> None:
    """Conditional acceptance by position, one panel a domain, with Wilson 95% bands (the paper's Figure 2)."""
    groups = {drafter: pooled_by_domain(rows) for drafter, rows in by_drafter(report["rows"]).items()}
    domains = list(next(iter(groups.values())))
    figure, axes = plt.subplots(1, len(domains), figsize=(4.2 * len(domains), 3.9), sharey=True, squeeze=False)
    labels: list[_Labels] = []
    for axis, domain in zip(axes[0], domains, strict=True):
        ends, last = [], 1
        for drafter, pooled in groups.items():
            line = pooled[domain]
            kept = [k for k, value in enumerate(line.shown) if value is not None]
            if not kept:
                continue
            x = [k + 1 for k in kept]
            y, low, high = ([values[k] for k in kept] for values in (line.conditional, line.low, line.high))
            axis.plot(x, y, color=color_of(drafter), marker=MARKERS.get(drafter, "x"), ms=4.5, lw=1.7)
            axis.fill_between(x, low, high, color=color_of(drafter), alpha=0.13, lw=0)
            ends.append((float(y[-1] or 0.0), drafter))
            last = max(last, x[-1])
        labels.append((axis, ends, last))
        axis.set_title(domain, fontsize=11)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("draft position k")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("P(accept k | 1..k-1 accepted)")
    _label_ends(labels)
    title = f"Conditional acceptance by position, target {report['target']} (bands: 95%, at least {MIN_ROUNDS} rounds)"
    figure.suptitle(title, fontsize=11, y=1.01)
    save_figure(figure, path)


def learning_figure(report: dict[str, Any], path: Path) -> None:
    """Accepted length of the real draft loop on held-out prompts while training, one panel a domain."""
    curves = {name: entry["learning_curve"] for name, entry in report["training"].items() if entry["learning_curve"]}
    keys = sorted({key for curve in curves.values() for point in curve for key in point if key.startswith("tau/")})
    domains = [d for d in ("math", "code", "chat") if f"tau/{d}" in keys] or [k.removeprefix("tau/") for k in keys]
    figure, axes = plt.subplots(1, len(domains), figsize=(4.2 * len(domains), 3.6), sharey=True, squeeze=False)
    labels: list[_Labels] = []
    for axis, domain in zip(axes[0], domains, strict=True):
        ends = []
        for drafter, curve in curves.items():
            points = [(p["step"], p[f"tau/{domain}"]) for p in curve if f"tau/{domain}" in p]
            axis.plot(*zip(*points, strict=True), color=color_of(drafter), marker=MARKERS.get(drafter, "x"), ms=4)
            ends.append((points[-1][1], drafter))
        labels.append((axis, ends, max(p["step"] for curve in curves.values() for p in curve)))
        axis.set_title(domain, fontsize=11)
        axis.set_xlabel("optimizer step")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("accepted length (tokens per round)")
    _label_ends(labels)
    figure.suptitle(f"Learning curves on held-out prompts, target {report['target']}", fontsize=11, y=1.01)
    save_figure(figure, path)


def apart(rising: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, each at its value or as far above the last as ``gap`` asks."""
    placed: list[float] = []
    for value in rising:
        placed.append(max(value, placed[-1] + gap) if placed else value)
    return placed


def _label_ends(labels: list[_Labels]) -> None:
    """Names at the right end of their lines, pushed apart where lines meet; after all panels share their limits."""
    low, high = labels[0][0].get_ylim()
    gap = (high - low) * 0.065
    for axis, ends, x in labels:
        heights = apart(sorted(value for value, _ in ends), gap)
        for height, (_, drafter) in zip(heights, sorted(ends), strict=True):
            axis.annotate(
                drafter,
                (x, height),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=color_of(drafter),
                annotation_clip=False,
            )


def save_figure(figure: Any, path: Path, wspace: float = 0.42) -> None:
    """Write and close."""
    figure.subplots_adjust(wspace=wspace)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
