"""Reports on load: the Pareto frontier, verification that follows the load, stale confidences, early exit.

In: rows of load tests. Out: results.json, figures, CSV and text in one folder. Knows nothing about engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dspark_exp.reports.figures import save_figure
from dspark_exp.reports.files import write_report
from dspark_exp.reports.intervals import Interval
from dspark_exp.reports.markdown import table

COLORS = {
    "plain": "#999999",
    "mtp1": "#E69F00",
    "fixed": "#0072B2",
    "threshold": "#CC79A7",
    "prefix_scheduler": "#009E73",
    "async_scheduler": "#D55E00",
}
MARKERS = {"plain": "o", "mtp1": "s", "fixed": "^", "threshold": "v", "prefix_scheduler": "P", "async_scheduler": "D"}
_ALLOWED_LOSS = 0.03
_VALID = 0.1  # share of throughput within which the simulator speaks for the engine


def write_pareto(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/pareto/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    _pareto_figure(results, folder / "pareto.png")
    return write_report(folder, results, _pareto_text(results), results["rows"])


def by_arm(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each arm, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def _pareto_figure(results: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7.5, 5))
    for arm, rows in by_arm(results["rows"]).items():
        x = [row["tokens_per_s_per_user"] for row in rows]
        y = [row["throughput"] for row in rows]
        spread = [
            [row["throughput"] - row["throughput_low"] for row in rows],
            [row["throughput_high"] - row["throughput"] for row in rows],
        ]
        axis.errorbar(
            x,
            y,
            yerr=spread,
            color=arm_color(arm),
            marker=MARKERS.get(arm, "x"),
            ms=5,
            lw=1.4,
            elinewidth=0.8,
            label=arm.replace("_", " "),
        )
        if arm == "async_scheduler":
            for row in rows:
                axis.annotate(
                    str(row["concurrency"]),
                    (row["tokens_per_s_per_user"], row["throughput"]),
                    xytext=(5, 5),
                    textcoords="offset points",
                    fontsize=8,
                )
    axis.set_xlabel("tokens per second of one user (median)")
    axis.set_ylabel("tokens per second, all users")
    axis.set_xlim(0)
    axis.set_ylim(0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(
        f"Throughput and interactivity, {results['drafter']} on {results['target']} (numbers: users)", fontsize=11
    )
    save_figure(figure, path)


def frontier_verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each concurrency: the asynchronous scheduler against the better of plain and fixed, and against every arm.

    ``against_simple``: ratio of throughputs. ``better``: arms that are faster for all users together, as an interval
    of 95 % says, and for each user as well. An interval is of one comparison: of forty between equal arms one says
    "faster" by chance.
    """
    found = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        here = {row["arm"]: row for row in rows if row["concurrency"] == concurrency}
        ours = here["async_scheduler"]
        simple = max((here[name] for name in ("plain", "fixed") if name in here), key=lambda row: row["throughput"])
        better = [
            name
            for name, row in here.items()
            if ratio_of_runs(row, ours).low > 1 and row["tokens_per_s_per_user"] > ours["tokens_per_s_per_user"]
        ]
        found.append({"concurrency": concurrency, "against_simple": ratio_of_runs(ours, simple), "better": better})
    return found


def ratio_of_runs(row: dict[str, Any], other: dict[str, Any], key: str = "runs") -> Interval:
    """Throughput of one arm over that of another, run by run, since a shared machine drifts from run to run.

    One run says nothing about the next: its interval is everything.

    Args:
        key: of other figures by run.
    """
    if len(row[key]) < 2:
        return Interval(row[key][0] / other[key][0], 0.0, math.inf)
    logs = Interval.of_runs(np.log(np.array(row[key]) / np.array(other[key])).tolist())
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def change(ratio: Interval) -> str:
    """As a gain or a loss in percent with its interval."""
    mean, low, high = (100 * (value - 1) for value in (ratio.mean, ratio.low, ratio.high))
    return f"{mean:+.1f} %" + (f" [{low:+.1f}, {high:+.1f}]" if math.isfinite(high) else " (one run: no interval)")


def _pareto_text(results: dict[str, Any]) -> str:
    rows = results["rows"]
    parts = [
        f"# Throughput against speed of each user, {results['drafter']} on {results['target']}",
        "Closed loop on the real engine: so many users, each sends its next request when the last has ended; answers "
        "from half of the token limit to all of it. All tokens over all seconds, the end included, when the last "
        "answers run out one by one. Arms take turns of `load.slice_s` seconds, so that the machine's drift reaches "
        "all alike. Medians of repeated runs; brackets: lowest and highest run.",
        "![Pareto](pareto.png)",
        "## Tokens per second, all users",
        _grid(rows, lambda row: f"{row['throughput']:.0f} [{row['throughput_low']:.0f}, {row['throughput_high']:.0f}]"),
        "## Tokens per second of one user (median)",
        _grid(rows, lambda row: f"{row['tokens_per_s_per_user']:.0f}"),
        "## Verified draft tokens a request and round",
        _grid(rows, lambda row: f"{row['verified_per_round']:.1f}"),
        *_scheduler_part(rows),
        *_simulator_part([row for row in rows if row.get("simulated")]),
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return "\n\n".join(parts) + "\n"


def _scheduler_part(rows: Sequence[dict[str, Any]]) -> list[str]:
    if "async_scheduler" not in by_arm(rows):
        return []
    verdicts = frontier_verdicts(rows)
    off = [v["concurrency"] for v in verdicts if v["better"]]
    lost = [v["concurrency"] for v in verdicts if v["against_simple"].high < 1 - _ALLOWED_LOSS]
    open_ = [v["concurrency"] for v in verdicts if v["against_simple"].low < 1 - _ALLOWED_LOSS]
    lines = [
        [
            str(v["concurrency"]),
            change(v["against_simple"]),
            "NO" if v["better"] else "yes",
            ", ".join(v["better"]) or "-",
        ]
        for v in verdicts
    ]
    header = ["users", "against the better of plain and fixed [95 % over runs]", "on the frontier", "better arms"]
    sentences = [
        _verdict(
            "It is on the frontier at every concurrency: no arm is faster beyond noise.",
            "It is off the frontier at",
            off,
        ),
        _verdict("It is at most 3 % below the better of plain and fixed.", "It is more than 3 % below at", lost)
        if lost or not open_
        else _verdict("", "That it is at most 3 % below is not shown at", open_),
    ]
    return ["## The asynchronous scheduler", table(header, lines), " ".join(sentences)]


def _simulator_part(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    errors = [row["simulated"] / row["throughput"] - 1 for row in rows]
    worst = max(range(len(rows)), key=lambda i: abs(errors[i]))
    within = sum(abs(error) <= _VALID for error in errors)
    return [
        "## The simulator against the engine",
        _grid(rows, lambda row: f"{100 * (row['simulated'] / row['throughput'] - 1):+.0f} %"),
        "Simulated over measured throughput. The machine's speed drifts (other tenants); a row of the capacity table "
        "is timed again in the gaps of the runs at each number of users, and simulated seconds are scaled by it. "
        f"{within} of {len(rows)} points lie within 10 %; the worst is {100 * errors[worst]:+.0f} % "
        f"({rows[worst]['arm']}, {rows[worst]['concurrency']} users)."
        + ("" if within == len(rows) else " Figures of the simulator count only where it is within 10 %."),
    ]


def _grid(rows: Sequence[dict[str, Any]], cell: Any) -> str:
    users = sorted({row["concurrency"] for row in rows})
    lines = []
    for arm, of_arm in by_arm(rows).items():
        known = {row["concurrency"]: row for row in of_arm}
        lines.append([arm, *(cell(known[u]) if u in known else "-" for u in users)])
    return table(["users", *map(str, users)], lines)


def _verdict(good: str, bad: str, places: Sequence[int]) -> str:
    return good if not places else f"{bad} {', '.join(map(str, places))} users."


def write_load_adaptive(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/load_adaptive/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4))
    users = sorted({row["concurrency"] for row in results["rows"]})
    for arm, rows in by_arm(results["rows"]).items():
        for axis, key in zip(axes, ("throughput", "verified_per_round"), strict=True):
            axis.plot(
                [row["concurrency"] for row in rows],
                [row[key] for row in rows],
                color=arm_color(arm),
                marker=MARKERS.get(arm, "x"),
                ms=5,
                lw=1.4,
                label=arm.replace("_", " "),
            )
    for axis, label in zip(
        axes, ("tokens per second, all users", "verified draft tokens a request and round"), strict=True
    ):
        axis.set_xscale("log", base=2)
        axis.set_xticks(users, [str(count) for count in users], minor=False)
        axis.set_xlabel("users")
        axis.set_ylabel(label)
        axis.set_ylim(0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"Verification that follows the load, {results['drafter']} on {results['target']}", fontsize=11)
    save_figure(figure, folder / "load_adaptive.png", wspace=0.25)
    ours = [row for row in results["rows"] if row["arm"] == "async_scheduler"]
    parts = [
        f"# Verification that follows the load, {results['drafter']} on {results['target']}",
        "![Load](load_adaptive.png)",
        f"The asynchronous scheduler verifies {ours[0]['verified_per_round']:.1f} draft tokens a request with "
        f"{_users(ours[0])} and {ours[-1]['verified_per_round']:.1f} with {_users(ours[-1])}; it "
        f"drafts in {100 * ours[0]['drafted_share']:.0f} % and {100 * ours[-1]['drafted_share']:.0f} % of rounds. "
        "(The paper: 4 to 6 tokens at moderate load, fewer as load rises.)",
        "## Tokens per second, all users",
        _grid(results["rows"], lambda row: f"{row['throughput']:.0f}"),
        "## Verified draft tokens a request and round",
        _grid(results["rows"], lambda row: f"{row['verified_per_round']:.2f}"),
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return write_report(folder, results, "\n\n".join(parts) + "\n", results["rows"])


def _users(row: dict[str, Any]) -> str:
    return f"{row['concurrency']} user{'s' * (row['concurrency'] > 1)}"


def write_early_exit(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/early_exit/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = results["rows"]
    users = max(row["concurrency"] for row in rows)
    here = {row["arm"]: row for row in rows if row["concurrency"] == users}
    lines, gains = [], list[tuple[float, str]]()
    for name, row in here.items():
        base = here.get(name.split(",")[0])
        gain = "-"
        if base is not None and base is not row:
            ratio = ratio_of_runs(row, base)
            gain = change(ratio)
            gains.append((ratio.mean - 1, name))
        lines.append(
            [
                name,
                f"{row['throughput']:.0f} [{row['throughput_low']:.0f}, {row['throughput_high']:.0f}]",
                gain,
                f"{100 * row['drafted_share']:.0f} %",
            ]
        )
    names = list(here)
    figure, axis = plt.subplots(figsize=(8, 0.4 * len(names) + 1.2))
    axis.barh(
        names[::-1],
        [here[n]["throughput"] for n in names[::-1]],
        color=[arm_color(n.split(",")[0]) for n in names[::-1]],
        height=0.6,
    )
    axis.set_xlabel(f"tokens per second, {users} users")
    axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, folder / "early_exit.png")
    best, which = max(gains)
    parts = [
        f"# Difficulty-aware drafting, {results['drafter']} on {results['target']}",
        "A request whose last 4 drafts had fewer accepted tokens than the limit on average is not drafted for in 8 "
        "rounds, then tried again. Decided from older rounds alone: the output stays exact.",
        "![Early exit](early_exit.png)",
        table(
            [
                "arm",
                f"tokens per second, {users} users",
                "against the same without exit [95 % over runs]",
                "drafted requests and rounds",
            ],
            lines,
        ),
        f"Best change at {users} users: {100 * best:+.1f} % ({which}).",
        "## All loads, tokens per second",
        _grid(rows, lambda row: f"{row['throughput']:.0f}"),
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return write_report(folder, results, "\n\n".join(parts) + "\n", rows)


def write_staleness(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/staleness/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = results["rows"]
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["load"], row["rate"]), []).append(row)
    figure, axis = plt.subplots(figsize=(7, 4))
    lines = []
    for index, ((load, rate), of_load) in enumerate(groups.items()):
        first = of_load[0]["busy_throughput"]
        lost = [100 * (1 - row["busy_throughput"] / first) for row in of_load]
        style = "-" if load == "steady" else "--"
        axis.plot(
            [r["staleness"] for r in of_load],
            lost,
            style,
            marker="o",
            ms=4,
            color=list(COLORS.values())[index + 1],
            label=f"{load}, {rate:.0%} of capacity",
        )
        lines.append([f"{load}, {rate:.0%}", *(f"{value:+.2f} %" for value in lost)])
    axis.axhline(0, color="#333333", lw=0.8)
    axis.set_xlabel("age of the confidences, rounds")
    axis.set_ylabel("throughput lost against age 1, %")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    save_figure(figure, folder / "staleness.png")
    ages = [row["staleness"] for row in next(iter(groups.values()))]
    worst = max(
        1 - row["busy_throughput"] / of_load[0]["busy_throughput"] for of_load in groups.values() for row in of_load
    )
    parts = [
        f"# What stale confidences cost, {results['drafter']} on {results['target']}",
        "Simulated on this machine's capacity curve with recorded outcomes; tokens per second of working time. Age 0 "
        "(this round's own confidences) is left out: an unconstrained search over them is not exact.",
        "![Staleness](staleness.png)",
        table(["load", *(f"age {age}" for age in ages)], lines),
        f"The most that age costs here: {100 * worst:.2f} %. The paper uses age 2 and measures no other.",
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return write_report(folder, results, "\n\n".join(parts) + "\n", rows)


def arm_color(arm: str) -> str:
    """The arm's colour in every figure."""
    return COLORS.get(arm, "#333333")
