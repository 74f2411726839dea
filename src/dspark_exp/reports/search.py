"""The report of a search: its trials, best first, how they learned, and the options that won.

In: trials. Out: results.json, CSV, figure, report.md; all of them can be written again from results.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from dspark_exp.reports.figures import save_figure
from dspark_exp.reports.files import write_report
from dspark_exp.reports.markdown import missing_note, table
from dspark_exp.reports.tables import macro_averages

_WON, _FINISHED, _PRUNED = "#D55E00", "#0072B2", "#999999"


def trial(
    number: int,
    options: Mapping[str, Any],
    curve: Sequence[Mapping[str, float]],
    job: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A trial as the report keeps it.

    Args:
        options: what was searched. curve: validations, points with ``step`` and ``tau``.
        job: its results; None = it was ended early.
    """
    best = max(curve, key=lambda point: point["tau"])
    found = {"trial": number, "options": dict(options), "val_tau": best["tau"], "val_step": int(best["step"])}
    found |= {"steps": int(curve[-1]["step"]), "curve": [{k: p[k] for k in ("step", "tau")} for p in curve]}
    average = macro_averages(job["rows"])["all"] if job is not None else None
    found["pruned"] = average is None
    return found | {name: getattr(average, name, None) for name in ("tau", "low", "high")}


def build_search_report(
    folder: Path,
    experiment: str,
    question: str,
    jobs: Sequence[Mapping[str, Any]],
    trials: Sequence[Mapping[str, Any]],
    missing: Sequence[dict[str, str]],
) -> dict[str, Any]:
    """Write the report's files into ``folder`` and return what they are made of.

    Args:
        jobs: results of the trials that were trained to the end, one at least. trials: see ``trial``.
        missing: trials that failed, with reasons.
    """
    results = {
        "experiment": experiment,
        "target": jobs[0]["target"],
        "search": {"question": question},
        "trials": list(trials),
        "missing": list(missing),
        "provenance": jobs[0]["provenance"],
    }
    write_search_files(results, folder)
    return results


def write_search_files(results: dict[str, Any], folder: Path) -> Path:
    """results.json, table.csv, the figure and report.md; returns the report's path."""
    rows = [
        {name: one[name] for name in ("trial", "val_tau", "val_step", "steps", "pruned", "tau", "low", "high")}
        | one["options"]
        for one in results["trials"]
    ]
    path = write_report(folder, results, _markdown(results), rows)
    _figure(results, folder / f"{results['experiment']}.png")
    return path


def print_search(results: Mapping[str, Any]) -> None:
    """The trials on the terminal, best first."""
    shown = Table(title=f"{results['experiment']} on {results['target']}")
    for name in ("trial", "val/tau", "options", ""):
        shown.add_column(name)
    for one in best_first(results):
        how = f"ended at step {one['steps']}" if one["pruned"] else f"tau {one['tau']:.2f}"
        shown.add_row(str(one["trial"]), f"{one['val_tau']:.2f}", overrides(one["options"]), how)
    Console().print(shown)


def best_first(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trials by falling ``val/tau``, those that were ended early behind the others."""
    return sorted(results["trials"], key=lambda one: (one["pruned"], -one["val_tau"]))


def overrides(options: Mapping[str, Any]) -> str:
    """Options as one types them."""
    return " ".join(f"{name}={_short(value)}" for name, value in options.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _markdown(results: Mapping[str, Any]) -> str:
    trials, question = best_first(results), results["search"]["question"]
    names = list(trials[0]["options"])
    body = [
        [
            str(one["trial"]),
            f"{one['val_tau']:.2f}",
            _outcome(one),
            *(_short(one["options"][name]) for name in names),
        ]
        for one in trials
    ]
    sections = [
        f"# {results['experiment']} on {results['target']}",
        question,
        missing_note(results["missing"]),
        f"Highest val/tau: {trials[0]['val_tau']:.2f}, with\n\n```\n{overrides(trials[0]['options'])}\n```",
        f"![{question}]({results['experiment']}.png)",
        table(["trial", "best val/tau", "tau on the benchmarks, 95 % over prompts", *names], body),
        f"{_effort(trials)} Trials are chosen by val/tau; the benchmarks play no part in the search.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _outcome(one: Mapping[str, Any]) -> str:
    return (
        f"ended at step {one['steps']}" if one["pruned"] else f"{one['tau']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
    )


def _effort(trials: Sequence[Mapping[str, Any]]) -> str:
    num_pruned, longest = sum(one["pruned"] for one in trials), max(one["steps"] for one in trials)
    after = f"Trained for {longest} steps at most: longer training may want other options."
    if not num_pruned:
        return f"All {len(trials)} trials were trained to the end. {after}"
    spent = sum(one["steps"] for one in trials) / (longest * len(trials))
    return (
        f"{num_pruned} of {len(trials)} trials were ended early (Optuna's median pruner: best val/tau so far below the "
        f"median of the finished trials at that step); {100 * spent:.0f} % of the steps were trained. {after}"
    )


def _figure(results: Mapping[str, Any], path: Path) -> None:
    trials = best_first(results)
    names = [name for name, value in trials[0]["options"].items() if isinstance(value, int | float)]
    figure, axes = plt.subplots(1, 1 + len(names), figsize=(4.2 + 2.7 * len(names), 3.6), squeeze=False)
    for one in reversed(trials):
        color = _color(one, trials)
        steps, tau = [p["step"] for p in one["curve"]], [p["tau"] for p in one["curve"]]
        axes[0][0].plot(steps, tau, color=color, marker="x" if one["pruned"] else "o", ms=4, lw=1.3)
    axes[0][0].set_xlabel("optimizer step")
    axes[0][0].set_ylabel("val/tau")
    for axis, name in zip(axes[0][1:], names, strict=True):
        for one in reversed(trials):
            face = "none" if one["pruned"] else _color(one, trials)
            axis.plot(one["options"][name], one["val_tau"], "o", ms=6, mfc=face, mec=_color(one, trials), ls="")
        _scale(axis, [one["options"][name] for one in trials])
        axis.set_xlabel(name, fontsize=9)
    for axis in axes[0]:
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_title("orange: the best; grey, open: ended early", fontsize=9)
    figure.suptitle(f"{results['search']['question']} Target {results['target']}", fontsize=11, y=1.02)
    save_figure(figure, path, wspace=0.3)


def _color(one: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> str:
    if one is trials[0]:
        return _WON
    return _PRUNED if one["pruned"] else _FINISHED


def _scale(axis: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) >= 8 * min(values):
        axis.set_xscale("log")
