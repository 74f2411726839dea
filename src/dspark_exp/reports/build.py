"""One report of a sweep: results.json, report.md, CSV and figures in one folder.

In: results of jobs. Out: files. Knows nothing about models; everything can be rebuilt from results.json alone.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_exp.reports.figures import learning_figure, position_figure
from dspark_exp.reports.markdown import report_markdown

_CSV_COLUMNS = (
    "drafter", "domain", "benchmark", "tau", "tau_low", "tau_high", "acceptance_rate", "verify_rate", "rounds",
    "emitted_tokens", "drafted_per_round", "verified_per_round", "prompts", "tokens_per_s", "plain_tokens_per_s",
    "speedup", "draft_s_per_round", "verify_s_per_round", "extend_s_per_round", "host_s_per_round",
)  # fmt: skip


def merged(experiment: str, jobs: Sequence[dict[str, Any]], missing: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Results of jobs as one: rows of all drafters, training and provenance by drafter.

    Jobs that share a drafter (another seed, say) are told apart by their job name.
    """
    names = Counter(job["drafter"] for job in jobs)
    jobs = [job if names[job["drafter"]] == 1 else _relabelled(job) for job in jobs]
    return {
        "experiment": experiment,
        "target": jobs[0]["target"],
        "rows": [row for job in jobs for row in job["rows"]],
        "training": {job["drafter"]: {**job["training"], "seconds": job["seconds"]} for job in jobs},
        "missing": list(missing),
        "provenance": {
            **jobs[0]["provenance"],
            "trainer": {job["drafter"]: job["provenance"]["trainer"] for job in jobs},
        },
    }


def _relabelled(job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "drafter": job["job"], "rows": [{**row, "drafter": job["job"]} for row in job["rows"]]}


def build_report(
    folder: Path, experiment: str, jobs: Sequence[dict[str, Any]], missing: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    """Write the report's files into ``folder`` and return the merged results."""
    report = merged(experiment, jobs, missing)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    write_files(report, folder)
    return report


def write_files(report: dict[str, Any], folder: Path) -> None:
    """Everything that follows from results.json."""
    position_figure(report, folder / "position.png")
    learning_figure(report, folder / "learning.png")
    with (folder / "table.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, _CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(report["rows"])
    with (folder / "positions.csv").open("w", newline="") as stream:
        plain = csv.writer(stream)
        plain.writerow(("drafter", "domain", "benchmark", "position", "conditional_acceptance", "survival", "count"))
        for row in report["rows"]:
            columns = zip(row["conditional_acceptance"], row["survival"], row["position_counts"], strict=True)
            for k, values in enumerate(columns, start=1):
                plain.writerow((row["drafter"], row["domain"], row["benchmark"], k, *values))
    (folder / "report.md").write_text(report_markdown(report))
