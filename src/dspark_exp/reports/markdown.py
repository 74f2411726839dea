"""The text of a report: Table 1 with intervals, gains, positions, confidence, speed, what was trained on.

In: merged results. Out: Markdown. Says what the figures can and cannot show; never fills a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_exp.reports.claims import Verdict, percent, table1_verdicts
from dspark_exp.reports.paper import BENCHMARKS, TABLE_1
from dspark_exp.reports.tables import MIN_ROUNDS, by_drafter, gain, in_order, macro_averages, pooled_by_domain

_BASELINES = ("eagle3", "dflash")


def report_markdown(report: dict[str, Any]) -> str:
    """The whole report."""
    sections = [
        f"# {report['experiment']} on {report['target']}",
        missing_note(report["missing"]),
        "## Accepted length per round (tau)",
        "Emitted tokens / rounds, the target's own token included, the prefill token not; ratio of sums over prompts. "
        "Brackets: 95% bootstrap interval over prompts. Averages are macro-averages over benchmarks.",
        _tau_table(report["rows"]),
        _gains(report["rows"]),
        claims_table(table1_verdicts(report["rows"])),
        "## Conditional acceptance by position",
        "![Conditional acceptance by position](position.png)",
        _position_table(report["rows"]),
        _learning(report),
        _confidence(report["rows"]),
        "## Speed",
        _speed_table(report["rows"]),
        "## What was trained, on what, for how long",
        _training(report),
        "## The paper's own Table 1, for reference (other targets, other data, other scale)",
        _paper_table(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _learning(report: dict[str, Any]) -> str:
    if not any(entry["learning_curve"] for entry in report["training"].values()):
        return ""
    return (
        "## Learning curves\n\n![Learning curves](learning.png)\n\n"
        "The real draft loop on held-out prompts during training; the checkpoint with the best `val/tau` is evaluated."
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def claims_table(verdicts: Sequence[Verdict]) -> str:
    """Claims with what was measured."""
    body = [
        [f"**{verdict.verdict}**", verdict.claim, percent(verdict.difference) or "-", str(verdict.num_runs)]
        for verdict in verdicts
    ]
    return table(["verdict", "claim", "relative difference, 95 %", "runs"], body) if body else ""


def missing_note(missing: Sequence[dict[str, str]]) -> str:
    """Jobs without results, with their reasons."""
    if not missing:
        return ""
    lines = [f"- **missing: {job['job']}**: {job['reason']}" for job in missing]
    return "\n".join(["Not everything finished; run the same command again to do what is missing.", *lines])


def _tau_table(rows: Sequence[dict[str, Any]]) -> str:
    benchmarks = in_order((row["benchmark"] for row in rows), ())
    domain_of = {row["benchmark"]: row["domain"] for row in rows}
    averages = list(macro_averages(rows))
    header = ["drafter", *(f"{b} ({domain_of[b]})" for b in benchmarks), *(f"**{name}**" for name in averages)]
    body = []
    for drafter, group in by_drafter(rows).items():
        cells = {row["benchmark"]: f"{row['tau']:.2f} [{row['tau_low']:.2f}, {row['tau_high']:.2f}]" for row in group}
        means = macro_averages(group)
        tail = [f"**{a.tau:.2f}** [{a.low:.2f}, {a.high:.2f}]" if (a := means.get(n)) else "-" for n in averages]
        body.append([drafter, *(cells.get(b, "-") for b in benchmarks), *tail])
    return table(header, body)


def _gains(rows: Sequence[dict[str, Any]]) -> str:
    means = {drafter: macro_averages(group) for drafter, group in by_drafter(rows).items()}
    ours = [name for name in means if name.startswith("dspark")]
    body = []
    for name in ours:
        for baseline in (b for b in _BASELINES if b in means):
            shared = [key for key in means[name] if key in means[baseline]]
            cells = []
            for key in shared:
                value, low, high = gain(means[name][key], means[baseline][key])
                cells.append(f"{value:+.1%} [{low:+.1%}, {high:+.1%}]")
            body.append([f"{name} over {baseline}", *cells])
    if not body:
        return ""
    return "Relative gains of the macro-averages:\n\n" + table(["gain", *means[ours[0]]], body)


def _position_table(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for drafter, group in by_drafter(rows).items():
        for domain, line in pooled_by_domain(group).items():
            values = ["-" if v is None else f"{v:.3f}" for v in line.shown]
            body.append([drafter, domain, *values, f"{line.counts[0]:,} / {line.counts[-1]:,}"])
    width = max(len(row) for row in body) - 3
    header = ["drafter", "domain", *(f"k={k + 1}" for k in range(width)), "rounds at k=1 / last"]
    note = f"Positions that fewer than {MIN_ROUNDS} rounds reached are left out here (all are in results.json)."
    return note + "\n\n" + table(header, body)


def _confidence(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for drafter, group in by_drafter(rows).items():
        for row in group:
            if "confidence" in row:
                sheet = row["confidence"]
                cells = [_first_last(sheet[name]) for name in ("ece", "auroc", "brier")]
                body.append([drafter, row["benchmark"], *cells])
    if not body:
        return ""
    return (
        "## Confidence (raw, before any calibration)\n\nPredicted survival against what was accepted, at position 1 "
        "and at the last position; every position is in results.json.\n\n"
        + table(["drafter", "benchmark", "ECE", "AUROC", "Brier"], body)
    )


def _first_last(values: Sequence[float | None]) -> str:
    ends = [values[0], values[-1]]
    return " → ".join("-" if value is None else f"{value:.3f}" for value in ends)


def _speed_table(rows: Sequence[dict[str, Any]]) -> str:
    body = []
    for drafter, group in by_drafter(rows).items():
        total = {key: sum(row.get(key, 0.0) * row["rounds"] for row in group) for key in _SPLIT}
        rounds = sum(row["rounds"] for row in group)
        split = [f"{1000 * total[key] / rounds:.2f}" for key in _SPLIT]
        speed = sum(row["speedup"] for row in group) / len(group)
        body.append([drafter, *split, f"{speed:.2f}"])
    header = ["drafter", "draft", "head", "verify", "extend", "host", "speed-up over plain decoding"]
    return (
        "Milliseconds per request and round, batched decoding in one process; `head` is the sequential head, `extend` "
        "the drafter taking in new target features. The speed-up is over plain decoding of the same target at the same "
        "batch size.\n\n" + table(header, body)
    )


_SPLIT = ("draft_s_per_round", "head_s_per_round", "verify_s_per_round", "extend_s_per_round", "host_s_per_round")


def _training(report: dict[str, Any]) -> str:
    origin = report["provenance"]
    data, evaluation = origin["data"], origin["evaluation"]
    trainers = origin["trainer"]
    body = []
    for drafter, entry in report["training"].items():
        trainer = trainers[drafter]
        body.append(
            [
                drafter,
                f"{entry['trainable_parameters']:,}",
                f"{entry['steps']} (best at {entry['selected_step']})",
                f"{trainer['lr']:g}",
                f"{trainer['batch_size'] * trainer['accumulate']} x {trainer['num_anchors']}",
                f"{entry['seconds']['train']:.0f} s",
            ]
        )
    header = ["drafter", "trained parameters", "steps", "lr", "sequences x anchors a step", "training time"]
    ramps = {trainer["objective_ramp"] for trainer in trainers.values()}
    notes = [
        _data_note(data),
        "Every drafter got the same data, steps, batch, learning-rate rule and selection. Eagle3 trains every "
        "position of a sequence, the block drafters the anchors drawn each step.",
        f"Objective: DSpark's weights come in over the first {max(ramps):.0%} of training, cross-entropy before that "
        "(the paper's weights are constant: trainer.objective_ramp=0). DFlash is cross-entropy throughout."
        if max(ramps) > 0
        else "Objective: constant weights, as in the paper.",
        f"Evaluation: temperature {evaluation['sampling']['temperature']:g}, whole blocks verified, at most "
        f"{evaluation['max_new_tokens']} new tokens, {_prompt_counts(report['rows'])}. Device: {origin['device']}, "
        f"{origin['threads']} threads, target in {origin['target']['dtype']}; code "
        f"{origin['code']['revision'] or origin['code']['version']}.",
        f"{_passes(report)} At this scale the figures show how the drafters compare under one small budget, early in "
        "training; they cannot show where each would end, and say nothing about the paper's absolute values.",
    ]
    return table(header, body) + "\n\n" + "\n".join(f"- {note}" for note in notes)


def _data_note(data: dict[str, Any]) -> str:
    train = data.get("train")
    if train is None:
        return "Data: none; the drafters were evaluated as given."
    return (
        f"Data: {train['rows']:,} conversations, {train['supervised_tokens']:,} supervised tokens of "
        f"{train['tokens']:,}, by domain {train['rows_by_domain']}; replies {data['replies']}. "
        f"Dropped rows: {train['dropped'] or 'none'}."
    )


def _passes(report: dict[str, Any]) -> str:
    """How often the training data was seen, beside the paper's 10 epochs of Open-PerfectBlend (section 4.1)."""
    origin = report["provenance"]
    if "train" not in origin["data"]:
        return ""
    rows = origin["data"]["train"]["rows"]
    passes = {
        round(entry["steps"] * trainer["batch_size"] * trainer["accumulate"] / rows, 1)
        for entry, trainer in ((report["training"][name], origin["trainer"][name]) for name in report["training"])
    }
    seen = f"{min(passes):g}" if len(passes) == 1 else f"{min(passes):g} to {max(passes):g}"
    return f"Passes over the data: {seen} of {rows:,} conversations (the paper: 10 of 1.3 million)."


def _prompt_counts(rows: Sequence[dict[str, Any]]) -> str:
    counts = {row["prompts"] for row in rows}
    return f"{min(counts)} to {max(counts)} prompts a benchmark" if len(counts) > 1 else f"{counts.pop()} prompts each"


def _paper_table() -> str:
    body = [
        [target, drafter, *(f"{value:.2f}" for value in values)]
        for target, drafters in TABLE_1.items()
        for drafter, values in drafters.items()
    ]
    return table(["target", "drafter", *BENCHMARKS], body)
