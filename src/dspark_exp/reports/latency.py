"""Report on an open loop: how long users wait for their first token and how fast they read, by rate of requests.

In: rows of load tests. Out: results.json, a figure, CSV and text in one folder. Knows nothing about engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dspark_exp.reports.figures import save_figure
from dspark_exp.reports.files import write_report
from dspark_exp.reports.load import MARKERS, arm_color, by_arm, change, ratio_of_runs
from dspark_exp.reports.markdown import table

_PANELS = (
    ("first_token_s_p90", "90 % have their first token within, ms", 1000),
    ("tokens_per_s_per_user", "tokens per second of one user (median)", 1),
)


def write_latency(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/latency/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    _figure(results, folder / "latency.png")
    rows = results["rows"]
    parts = [
        f"# Waiting and reading under load, {results['drafter']} on {results['target']}",
        f"Open loop on the real engine with {results['num_rows']} rows: requests arrive whatever the engine does, at a "
        f"share of the {results['served_per_s']:.1f} requests a second that plain decoding serves in a closed loop. "
        "Users wait from their arrival on. Every arm gets the same requests at the same times, and arms take turns of "
        "`load.slice_s` seconds. Bursty: quiet and busy spells in turn, at eight times the quiet rate in busy ones.",
        "![Latency](latency.png)",
        "## First token: milliseconds that half of the users and 90 % of them wait at most",
        _grid(rows, lambda row: f"{1000 * row['first_token_s']:.0f}, {1000 * row['first_token_s_p90']:.0f}"),
        "## Tokens per second of one user after the first (median)",
        _grid(rows, lambda row: f"{row['tokens_per_s_per_user']:.0f}"),
        *_against_plain(rows),
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return write_report(folder, results, "\n\n".join(parts) + "\n", rows)


def _figure(results: dict[str, Any], path: Path) -> None:
    kinds = list(dict.fromkeys(row["arrivals"] for row in results["rows"]))
    figure, axes = plt.subplots(2, len(kinds), figsize=(4.6 * len(kinds) + 1, 7), sharey="row", squeeze=False)
    for (key, label, scale), line in zip(_PANELS, axes, strict=True):
        for kind, axis in zip(kinds, line, strict=True):
            here = [row for row in results["rows"] if row["arrivals"] == kind]
            for arm, rows in by_arm(here).items():
                axis.plot(
                    [100 * row["share"] for row in rows],
                    [scale * row[key] for row in rows],
                    color=arm_color(arm),
                    marker=MARKERS.get(arm, "x"),
                    ms=5,
                    lw=1.4,
                    label=arm.replace("_", " "),
                )
            if scale == 1:
                axis.set_xlabel("requests a second, % of what plain decoding serves")
            else:
                axis.set_title(kind, fontsize=11)
            axis.set_ylim(0)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(label)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9, ncol=3, loc="upper center", bbox_to_anchor=(0.5, 0.04))
    figure.suptitle(f"Waiting and reading under load, {results['drafter']} on {results['target']}", fontsize=11, y=0.95)
    save_figure(figure, path, wspace=0.08)


def _grid(rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    points = list(dict.fromkeys((row["arrivals"], row["share"]) for row in rows))
    lines = [[arm, *map(cell, of_arm)] for arm, of_arm in by_arm(rows).items()]
    return table(["arm", *(f"{kind}, {share:.0%}" for kind, share in points)], lines)


def _against_plain(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the asynchronous scheduler changes for users, with intervals over runs."""
    plain, ours = (by_arm(rows).get(name) for name in ("plain", "async_scheduler"))
    if plain is None or ours is None:
        return []
    pairs = list(zip(ours, plain, strict=True))
    lines = [
        [
            f"{row['arrivals']}, {row['share']:.0%}",
            change(ratio_of_runs(row, base, "waits")),
            change(ratio_of_runs(row, base, "speeds")),
        ]
        for row, base in pairs
    ]
    slower = [line[0] for line, (row, base) in zip(lines, pairs, strict=True) if _is_slower(row, base)]
    return [
        "## The asynchronous scheduler against plain decoding [95 % over runs]",
        table(["arrivals", "wait of 90 %", "speed of one user"], lines),
        "Its users read faster than, or as fast as, those of plain decoding at every rate, within noise."
        if not slower
        else f"Its users read more slowly at {'; '.join(slower)}.",
    ]


def _is_slower(row: dict[str, Any], base: dict[str, Any]) -> bool:
    return ratio_of_runs(row, base, "speeds").high < 1
