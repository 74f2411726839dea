"""One HTML page over all reports: the paper's claims with verdicts, then every report with its figures and tables.

In: a folder of reports. Out: ``index.html`` in it, which works offline: styles and the sorting of tables are inside,
figures are linked relative to it. Readable in dark and light, on a desk and on a phone.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from dspark_exp.reports.claims import OUT_OF_SCALE, Verdict, percent, table1_verdicts
from dspark_exp.reports.page_style import SCRIPT, STYLE
from dspark_exp.reports.sweeps import arms_of, verdicts_of


@dataclass(frozen=True)
class _Report:
    experiment: str
    target: str
    text: str  # Markdown
    verdicts: list[Verdict]
    origin: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.experiment}-{self.target}"


def write_index(reports: Path) -> Path:
    """Write ``<reports>/index.html`` from the reports that are there; returns its path."""
    found = [_read(path) for path in sorted(reports.glob("*/*/report.md"))]
    body = "\n".join([_head(found), _claims(found), *(_section(report) for report in found)])
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>dspark_exp reports</title><style>{STYLE}</style></head>\n<body><main>{body}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )
    path = reports / "index.html"
    path.write_text(page)
    return path


def _read(path: Path) -> _Report:
    results = json.loads(path.with_name("results.json").read_text()) if path.with_name("results.json").exists() else {}
    experiment, target = path.parent.parent.name, path.parent.name
    if "sweep" in results:
        verdicts = verdicts_of(results, arms_of(results))
    else:
        verdicts = table1_verdicts(results["rows"]) if experiment == "table1" else []
    return _Report(experiment, target, path.read_text(), verdicts, results.get("provenance") or {})


def _head(found: list[_Report]) -> str:
    by_experiment: dict[str, list[_Report]] = {}
    for report in found:
        by_experiment.setdefault(report.experiment, []).append(report)
    entries = [
        f"<li>{html.escape(name)}: "
        + ", ".join(f'<a href="#{report.key}">{html.escape(report.target)}</a>' for report in group)
        + "</li>"
        for name, group in by_experiment.items()
    ]
    return (
        "<header><h1>dspark_exp: what was measured</h1><p>Every report of this folder, rebuilt from its results.json "
        "by <code>python -m dspark_exp task=report</code>. Click a column to sort its table.</p>"
        f'<nav><ul class="toc">{"".join(entries)}</ul></nav></header>'
    )


def _claims(found: list[_Report]) -> str:
    rows = [
        _claim_row(
            verdict, f'<a href="#{report.key}">{html.escape(report.experiment)}, {html.escape(report.target)}</a>'
        )
        for report in found
        for verdict in report.verdicts
        if verdict.verdict != "missing"
    ]
    rows += [_claim_row(verdict, "-") for verdict in OUT_OF_SCALE]
    verdicts = Counter(
        verdict.verdict for report in found for verdict in report.verdicts if verdict.verdict != "missing"
    )
    verdicts.update(verdict.verdict for verdict in OUT_OF_SCALE)
    summary = ", ".join(f"{count} {name}" for name, count in verdicts.most_common())
    return (
        "<section><h2>Claims</h2><p>A claim of the paper, or a question it leaves open, is <em>shown</em> where the "
        "whole 95 % interval of the relative difference lies on its side, <em>contradicted</em> where it lies on the "
        "other, and <em>not shown</em> between. Differences are over training runs where a report has several, else "
        f'over prompts of one run. {summary}.</p><div class="wide claims"><table><thead><tr><th>verdict</th>'
        "<th>claim</th><th>measured difference</th><th>runs</th><th>report</th></tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table></div></section>"
    )


def _claim_row(verdict: Verdict, where: str) -> str:
    kind = verdict.verdict.replace(" ", "-")
    return (
        f'<tr><td><span class="verdict {kind}">{verdict.verdict}</span></td><td>{html.escape(verdict.claim)}</td>'
        f"<td>{percent(verdict.difference) or '-'}</td><td>{verdict.num_runs or '-'}</td><td>{where}</td></tr>"
    )


def _section(report: _Report) -> str:
    rendered = MarkdownIt("commonmark", {"html": False}).enable("table").render(report.text)
    rendered = re.sub(r'src="(?![a-z]+:|/)', f'loading="lazy" src="{report.experiment}/{report.target}/', rendered)
    rendered = rendered.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    title = re.search(r"<h1>(.*?)</h1>", rendered)
    rendered = re.sub(r"<h1>.*?</h1>", "", rendered, count=1)
    rendered = rendered.replace("<h2>", "<h3>").replace("</h2>", "</h3>")
    origin = html.escape(json.dumps(report.origin, indent=1, default=str))
    provenance = f"<details><summary>Provenance</summary><pre>{origin}</pre></details>" if report.origin else ""
    return (
        f'<section id="{report.key}"><h2>{title.group(1) if title else report.key}</h2>{rendered}{provenance}'
        f'<p class="files">Files: <a href="{report.experiment}/{report.target}/results.json">results.json</a>, '
        f'<a href="{report.experiment}/{report.target}/report.md">report.md</a></p></section>'
    )
