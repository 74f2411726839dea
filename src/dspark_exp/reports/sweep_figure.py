"""The figure of a sweep: accepted length against the swept option, one panel a domain, intervals as bars.

In: points. Out: a PNG. Knows nothing about jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from dspark_exp.reports.figures import COLORS, MARKERS, save_figure
from dspark_exp.reports.intervals import Interval

_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


_BARS: dict[str, Any] = {"ms": 5, "capsize": 3, "elinewidth": 1}
Point = tuple[str, Any, Mapping[str, Interval]]  # line, x, tau by domain


def sweep_figure(points: Sequence[Point], x_name: str, domains: Sequence[str], title: str, path: Path) -> None:
    """One line for every distinct first entry of ``points``; x is numeric where all its values are."""
    lines = list(dict.fromkeys(line for line, _, _ in points))
    values = list(dict.fromkeys(x for _, x, _ in points))
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    place = {str(x): float(x) if numeric else float(index) for index, x in enumerate(values)}
    logarithmic = numeric and min(place.values()) > 0 and max(place.values()) >= 8 * min(place.values())
    width = 3.4 if len(domains) > 1 else 5.0
    figure, axes = plt.subplots(1, len(domains), figsize=(width * len(domains), 3.7), squeeze=False)
    for panel, (axis, domain) in enumerate(zip(axes[0], domains, strict=True)):
        for index, line in enumerate(lines):
            found = sorted((place[str(x)], tau[domain]) for name, x, tau in points if name == line)
            xs, means = [x for x, _ in found], [tau.mean for _, tau in found]
            spread = [[tau.mean - tau.low for _, tau in found], [tau.high - tau.mean for _, tau in found]]
            color = COLORS.get(line, _PALETTE[index % len(_PALETTE)])
            marker, width_pt = MARKERS.get(line, "o"), 1.7 if numeric and len(values) <= 8 else 0.0
            axis.errorbar(xs, means, spread, None, marker=marker, lw=width_pt, color=color, label=line, **_BARS)
        if logarithmic:
            axis.set_xscale("log")
        if not numeric or len(values) <= 8:
            axis.set_xticks(list(place.values()), list(place), minor=False)
            axis.minorticks_off()
        if not numeric:
            axis.tick_params(axis="x", rotation=25)
            axis.margins(x=0.15)
        axis.set_title("mean of all benchmarks" if domain == "all" else domain, fontsize=10.5)
        axis.set_xlabel(x_name, fontsize=9)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if panel == 0:
            axis.set_ylabel("accepted length (tokens per round)")
            if len(lines) > 1 and lines != [str(x) for x in values]:
                axis.legend(frameon=False, fontsize=8.5)
    figure.suptitle(f"{title} (bars: 95 %)", fontsize=11, y=1.02)
    save_figure(figure, path, wspace=0.28)
