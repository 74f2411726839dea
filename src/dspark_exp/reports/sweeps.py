"""The report of a sweep: accepted length of its arms over training runs, a figure, and a verdict on each claim.

In: results of jobs and the options in which they differ. Out: results.json, CSV, figure, report.md; all of them can be
written again from results.json alone. An arm is a set of jobs that differ in their seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_exp.metrics import interval
from dspark_exp.reports.claims import Verdict, judge, percent
from dspark_exp.reports.files import write_report
from dspark_exp.reports.intervals import Interval
from dspark_exp.reports.markdown import claims_table, missing_note, table
from dspark_exp.reports.sweep_figure import sweep_figure
from dspark_exp.reports.tables import Average, macro_averages

_ROW_KEYS = (
    "drafter", "benchmark", "domain", "tau", "conditional_acceptance", "position_counts", "emitted_by_prompt",
    "rounds_by_prompt", "rounds", "emitted_tokens",
)  # fmt: skip
_ARM_KEYS = ("first", "second", "first_over", "second_over")


@dataclass(frozen=True)
class Arm:
    """Runs of the same options; macro-averages of each by domain, and ``all``."""

    options: dict[str, Any]
    runs: dict[int, dict[str, Average]]  # by seed
    parameters: int
    train_s: float

    def tau(self, domain: str) -> Interval:
        found = [run[domain] for run in self.runs.values()]
        if len(found) > 1:
            return Interval.of_runs([average.tau for average in found])
        return Interval(found[0].tau, found[0].low, found[0].high)


def build_sweep_report(
    folder: Path,
    experiment: str,
    about: dict[str, Any],
    jobs: Sequence[dict[str, Any]],
    options: Sequence[dict[str, Any]],
    missing: Sequence[dict[str, str]],
) -> dict[str, Any]:
    """Write the report's files into ``folder`` and return what they are made of.

    Args:
        about: the sweep's x, lines, question and claims.
        jobs: results of the finished jobs. options: their flat resolved configs, in the same order.
        missing: jobs that did not finish, with reasons.
    """
    named = {about["x"], *about["lines"], *_claimed(about)}
    filing = {"experiment", "name"}
    varying = {key for key in options[0] if len({str(one.get(key)) for one in options}) > 1} - filing | named
    results = {
        "experiment": experiment,
        "target": jobs[0]["target"],
        "sweep": {key: about[key] for key in ("x", "lines", "question", "claims")},
        "jobs": [
            _slim(job, {key: one.get(key) for key in sorted(varying)}) for job, one in zip(jobs, options, strict=True)
        ],
        "missing": list(missing),
        "provenance": {**jobs[0]["provenance"], "code": _revisions(jobs)},
    }
    write_sweep_files(results, folder)
    return results


def write_sweep_files(results: dict[str, Any], folder: Path) -> Path:
    """results.json, table.csv, the figure and report.md; returns the report's path."""
    arms = arms_of(results)
    rows = [
        {"arm": arm_label(arm, results), "runs": len(arm.runs), "domain": domain}
        | dict(zip(("tau", "tau_low", "tau_high"), (value.mean, value.low, value.high), strict=True))
        for arm in arms
        for domain in _domains(arms)
        for value in (arm.tau(domain),)
    ]
    path = write_report(folder, results, _markdown(results, arms), rows)
    x = results["sweep"]["x"]
    lines = [key for key in _keys(results) if key != x] or ([x] if x == "drafter.name" else [])  # drafters keep colours
    points = [
        (
            " ".join(str(arm.options[key]) for key in lines),
            arm.options[x],
            {d: arm.tau(d) for d in _domains(arms)},
        )
        for arm in arms
    ]
    num_runs = max(len(arm.runs) for arm in arms)
    title = f"{results['sweep']['question']} Target {results['target']}, {num_runs} run{'s' * (num_runs > 1)} an arm"
    sweep_figure(points, x, _domains(arms), title, folder / f"{results['experiment']}.png")
    return path


def arms_of(results: dict[str, Any]) -> list[Arm]:
    """Jobs grouped by the options that the report lays out, in the order of the jobs."""
    groups = _grouped(results["jobs"], _keys(results))
    return [
        Arm(
            group[0]["options"],
            {int(job["options"].get("seed") or 0): macro_averages(job["rows"]) for job in group},
            group[0]["parameters"],
            float(np.mean([job["train_s"] for job in group])),
        )
        for group in groups.values()
    ]


def verdicts_of(results: dict[str, Any], arms: Sequence[Arm]) -> list[Verdict]:
    """Every claim of the sweep against its arms."""
    return [_verdict(claim, arms) for claim in results["sweep"]["claims"]]


def arm_label(arm: Arm, results: dict[str, Any]) -> str:
    """``dflash, num_layers 5``: the options that the report lays out."""
    keys = _keys(results)
    named = {key: "" if key == "drafter.name" else key.rsplit(".", 1)[-1] + " " for key in keys}
    return ", ".join(f"{named[key]}{arm.options[key]}" for key in keys)


def _keys(results: dict[str, Any]) -> list[str]:
    """Options that tell arms apart: the sweep's own, and any other in which jobs of one arm and seed would differ."""
    keys = [*results["sweep"]["lines"], results["sweep"]["x"]]
    for jobs in _grouped(results["jobs"], [*keys, "seed"]).values():
        differing = (key for key in jobs[0]["options"] if len({str(job["options"][key]) for job in jobs}) > 1)
        keys += [key for key in differing if key not in keys]
    return keys


def _grouped(jobs: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for job in jobs:
        groups.setdefault(tuple(str(job["options"].get(key)) for key in keys), []).append(job)
    return groups


def print_sweep(results: dict[str, Any]) -> None:
    """Arms and verdicts on the terminal."""
    arms = arms_of(results)
    shown = Table(title=f"{results['sweep']['question']} {results['experiment']} on {results['target']}: tau, 95%")
    for name in ("arm", "runs", *_domains(arms)):
        shown.add_column(name)
    for arm in arms:
        shown.add_row(arm_label(arm, results), str(len(arm.runs)), *(str(arm.tau(domain)) for domain in _domains(arms)))
    console = Console()
    console.print(shown)
    for verdict in verdicts_of(results, arms):
        console.print(f"{verdict.verdict}: {verdict.claim} {percent(verdict.difference)}")


def _verdict(claim: Mapping[str, Any], arms: Sequence[Arm]) -> Verdict:
    first, second = _find(arms, claim["first"]), _find(arms, claim["second"])
    over = [_find(arms, claim[key]) if claim.get(key) else None for key in ("first_over", "second_over")]
    num_wanted = sum(bool(claim.get(key)) for key in _ARM_KEYS)
    found = [arm for arm in (first, second, *over) if arm is not None]
    seeds = sorted(set.intersection(*(set(arm.runs) for arm in found))) if found else []
    if first is None or second is None or len(found) < num_wanted or not seeds:
        return Verdict(claim["text"], None, 0, "missing")

    def of(arm: Arm, divisor: Arm | None, seed: int) -> tuple[float, np.ndarray]:
        ours = arm.runs[seed]["all"]
        if divisor is None:
            return ours.tau, ours.resampled
        base = divisor.runs[seed]["all"]
        return ours.tau / base.tau, ours.resampled / base.resampled

    pairs = [(of(first, over[0], seed), of(second, over[1], seed)) for seed in seeds]
    values = [a[0] / b[0] - 1 for a, b in pairs]
    if len(values) > 1:
        difference = Interval.of_runs(values)
    else:
        difference = Interval(values[0], *interval(pairs[0][0][1] / pairs[0][1][1] - 1))
    margin = claim.get("margin", 0.0) if claim.get("kind") == "equal_within" else 0.0
    return Verdict(claim["text"], difference, len(seeds), judge(difference, margin))


def _find(arms: Sequence[Arm], options: Mapping[str, Any]) -> Arm | None:
    found = [arm for arm in arms if all(str(arm.options.get(key)) == str(value) for key, value in options.items())]
    return found[0] if len(found) == 1 else None


def _claimed(about: Mapping[str, Any]) -> set[str]:
    arms = [claim.get(key) or {} for claim in about["claims"] for key in _ARM_KEYS]
    return {option for arm in arms for option in arm}


def _slim(job: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What the report needs of a job."""
    return {
        "options": options,
        "job": job["job"],
        "rows": [{key: row[key] for key in _ROW_KEYS} for row in job["rows"]],
        "parameters": job["training"]["trainable_parameters"],
        "steps": job["training"]["steps"],
        "train_s": job["seconds"]["train"],
    }


def _revisions(jobs: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({str(job["provenance"]["code"]["revision"]) for job in jobs})


def _domains(arms: Sequence[Arm]) -> list[str]:
    names = list(next(iter(arms[0].runs.values())))
    return ["all", *(name for name in names if name != "all")] if len(names) > 2 else ["all"]


def _markdown(results: dict[str, Any], arms: Sequence[Arm]) -> str:
    about, origin = results["sweep"], results["provenance"]
    domains = _domains(arms)
    body = [
        [
            arm_label(arm, results),
            str(len(arm.runs)),
            *(str(arm.tau(domain)) for domain in domains),
            f"{arm.parameters:,}",
            f"{arm.train_s:.0f} s",
        ]
        for arm in arms
    ]
    prompts = len(results["jobs"][0]["rows"][0]["emitted_by_prompt"])
    steps = sorted({job["steps"] for job in results["jobs"]})
    sampling = origin["evaluation"]["sampling"]
    sections = [
        f"# {results['experiment']} on {results['target']}",
        about["question"],
        missing_note(results["missing"]),
        claims_table(verdicts_of(results, arms)),
        f"![{about['question']}]({results['experiment']}.png)",
        "Accepted length (tau, tokens a round), mean over benchmarks. Intervals are 95 %: Student's t over training "
        "runs, or, of a single run, a bootstrap over prompts. Runs of one seed see the same rows and the same "
        "evaluation prompts in every arm, so claims are judged on differences run by run.",
        table(["arm", "runs", *domains, "trained parameters", "training time"], body),
        f"Every arm: {' or '.join(map(str, steps))} optimizer steps, {prompts} prompts a benchmark, temperature "
        f"{sampling['temperature']:g}, at most {origin['evaluation']['max_new_tokens']} new tokens, whole blocks "
        f"verified. Device: {origin['device']}; code {', '.join(origin['code'])}. Arms are compared early in training "
        "under one small budget: this says nothing about where they would end.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"
