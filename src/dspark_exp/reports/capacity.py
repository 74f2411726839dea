"""The capacity report: seconds and passes per second by forward batch, as measured.

In: a capacity table. Out: results.json, a figure, CSV and text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dspark_exp.reports.figures import apart, save_figure
from dspark_exp.reports.files import write_report
from dspark_exp.reports.markdown import table

_BY_CONTEXT = ("context_lengths", "seconds", "spread")
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def write_capacity_report(folder: Path, target: str, capacity: dict[str, Any]) -> None:
    """Files of ``reports/capacity/<target>/`` from a capacity table as it is stored."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {"experiment": "capacity", "target": target, **capacity}
    rows = [
        {"context": context, "tokens": b, "seconds": s, "spread": d, "steps_per_s": 1 / s}
        for context, seconds, spread in zip(*(capacity[k] for k in _BY_CONTEXT), strict=True)
        for b, s, d in zip(capacity["tokens"], seconds, spread, strict=True)
    ]
    _figure(capacity, target, folder / "capacity.png")
    write_report(folder, results, _text(capacity, target), rows, "capacity.csv")


def _figure(capacity: dict[str, Any], target: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    tokens, measured = capacity["tokens"], capacity["measured"]
    for index, (context, seconds, spread) in enumerate(zip(*(capacity[k] for k in _BY_CONTEXT), strict=True)):
        color, line = _COLORS[index % len(_COLORS)], {"ms": 4, "lw": 1}
        axes[0].plot(tokens, [1 / s for s in seconds], ".-", color=color, label=f"context {context}", **line)
        axes[1].plot(tokens, [1e3 * s for s in seconds], ".-", color=color, **line)
        low, high = ([1e3 * (s + sign * d) for s, d in zip(seconds, spread, strict=True)] for sign in (-1, 1))
        axes[1].fill_between(tokens, low, high, color=color, alpha=0.2, lw=0)
    axes[0].set_ylabel("SPS(B), passes per second")
    axes[0].legend(frameon=False, fontsize=9)
    axes[1].set_ylabel("milliseconds a pass")
    rounds = capacity["rounds"]
    for seconds, color in zip(rounds["seconds"], _shades(len(rounds["requests"])), strict=True):
        axes[2].plot(rounds["lengths"], [1e3 * s for s in seconds], ".-", ms=4, lw=1, color=color)
    ends = sorted((1e3 * seconds[-1], n) for n, seconds in zip(rounds["requests"], rounds["seconds"], strict=True))
    for height, (_, requests) in zip(apart([end for end, _ in ends], 0.045 * ends[-1][0]), ends, strict=True):
        label = f"{requests} requests" if requests > 1 else "1 request"
        at = (rounds["lengths"][-1], height)
        axes[2].annotate(label, at, xytext=(5, -3), textcoords="offset points", fontsize=8)
    for seconds, color in zip(rounds["plain"], _shades(len(rounds["requests"])), strict=True):
        axes[2].plot([-0.6], [1e3 * seconds], "x", ms=5, color=color)
    axes[2].set_ylabel(f"milliseconds a round ({measured.get('drafter', 'drafter')})")
    axes[2].set_xlabel("verified draft tokens a request (x: not drafted)")
    for axis in axes:
        axis.set_ylim(0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:2]:
        axis.set_xlabel("tokens in the forward batch B")
    figure.suptitle(f"Capacity of {target} on {measured.get('device', 'this machine')}", fontsize=11)
    save_figure(figure, path, wspace=0.3)


def _shades(count: int) -> list[Any]:
    return [plt.get_cmap("viridis")(0.05 + 0.8 * k / max(1, count - 1)) for k in range(count)]


def _text(capacity: dict[str, Any], target: str) -> str:
    tokens, first, rounds = capacity["tokens"], capacity["seconds"][0], capacity["rounds"]
    shown = sorted({*(b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if b in tokens), tokens[-1]})
    rows = []
    for b in shown:
        k = tokens.index(b)
        columns = zip(capacity["seconds"], capacity["spread"], strict=True)
        rows.append([str(b), *(f"{1e3 * s[k]:.1f} ± {1e3 * d[k]:.1f}" for s, d in columns)])
    growth = (first[-1] - first[0]) / max(1, tokens[-1] - 1)
    flat = max((b for b, s in zip(tokens, first, strict=True) if s <= 1.1 * first[0]), default=1)
    facts = ", ".join(f"{name} {value}" for name, value in capacity["measured"].items())
    parts = [
        f"# Capacity of {target}",
        "Median milliseconds of one ragged verification pass of B tokens, LM head included, ± half the interquartile "
        "range. As measured: nothing is smoothed.",
        "![Capacity](capacity.png)",
        table(["B", *(f"context {c}" for c in capacity["context_lengths"])], rows),
        f"A pass of up to {flat} tokens costs at most a tenth more than one of 1 token; over the whole range a token "
        f"adds {1e6 * growth:.0f} microseconds.",
        "Whole rounds of the engine (drafting, verification, host), milliseconds, by verified draft tokens a request:",
        table(
            ["requests", "not drafted", *(str(length) for length in rounds["lengths"])],
            [
                [str(r), f"{1e3 * p:.1f}", *(f"{1e3 * s:.1f}" for s in seconds)]
                for r, p, seconds in zip(rounds["requests"], rounds["plain"], rounds["seconds"], strict=True)
            ],
        ),
        f"Measured with: {facts}.",
    ]
    return "\n\n".join(parts) + "\n"
