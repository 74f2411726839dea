"""Reports on confidence: reliability diagrams, threshold sweep, calibration under a change of domain.

In: results. Out: results.json, figures, CSV and text in one folder. Knows nothing about models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dspark_exp.reports.figures import save_figure
from dspark_exp.reports.files import write_report
from dspark_exp.reports.markdown import table

RAW, CALIBRATED, GREY = "#D55E00", "#0072B2", "#999999"
_SHOWN_POSITIONS = (1, 3, 5, 7)
_ENOUGH = 500  # rounds from which a position's AUROC counts


def write_reliability(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/reliability/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    _reliability_figure(results, folder / "reliability.png")
    rows = [
        {
            "domain": domain,
            "position": k + 1,
            "rounds": raw["counts"][k],
            "auroc": raw["auroc"][k],
            "ece_raw": raw["ece"][k],
            "ece_calibrated": fitted["ece"][k],
            "brier_raw": raw["brier"][k],
            "brier_calibrated": fitted["brier"][k],
        }
        for domain, pair in results["domains"].items()
        for raw, fitted in [(pair["raw"], pair["calibrated"])]
        for k in range(len(raw["counts"]))
    ]
    return write_report(folder, results, _reliability_text(results), rows)


def _reliability_figure(results: dict[str, Any], path: Path) -> None:
    pair = results["domains"]["all"]
    size = len(pair["raw"]["counts"])
    positions = [k for k in _SHOWN_POSITIONS if k <= size]
    figure, axes = plt.subplots(1, len(positions), figsize=(3.6 * len(positions), 3.7), sharey=True, squeeze=False)
    for axis, k in zip(axes[0], positions, strict=True):
        counts = axis.twinx()
        counts.axis("off")
        for name, color in (("raw", RAW), ("calibrated", CALIBRATED)):
            sheet = pair[name]
            bins = [b for b in sheet["bins"][k - 1] if b[0] >= 10]
            label = f"{name}: ECE {_percent(sheet['ece'][k - 1])}"
            axis.plot([b[1] for b in bins], [b[2] for b in bins], "o-", ms=3.5, lw=1.5, color=color, label=label)
            if name == "calibrated":
                counts.bar([b[1] for b in bins], [b[0] for b in bins], width=0.04, color=GREY, alpha=0.25, lw=0)
                counts.set_ylim(0, 2.5 * max((b[0] for b in bins), default=1))
        axis.plot([0, 1], [0, 1], ":", color="#333333", lw=1)
        reach = f" of {_number(pair['analytic']['auroc'][k - 1])}" if "analytic" in pair else ""
        axis.set_title(f"position {k}: AUROC {_number(pair['raw']['auroc'][k - 1])}{reach}", fontsize=10)
        axis.set_xlabel("predicted survival")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share of prefixes accepted")
    figure.suptitle(
        f"Reliability of {results['drafter']} on {results['target']}, test split (bars: rounds)", fontsize=11, y=1.02
    )
    save_figure(figure, path, wspace=0.12)


def _reliability_text(results: dict[str, Any]) -> str:
    pair, fitted = results["domains"]["all"], results["calibration"]
    analytic = pair.get("analytic")
    ranked = ["raw", "analytic"] if analytic else ["raw"]
    rows = []
    for k, count in enumerate(pair["raw"]["counts"]):
        cells = [_percent(pair[name]["ece"][k]) for name in ("raw", "calibrated")]
        cells += [_number(pair[name]["auroc"][k]) for name in ranked]
        cells += [_number(pair[n]["brier"][k], 4) for n in ("raw", "calibrated")]
        rows.append([str(k + 1), str(count), f"{fitted['temperatures'][k]:.2f}", *cells])
    mean_raw, mean_sts = (results["methods"][name]["mean_ece"] for name in ("raw", "sts"))
    change = results["sts_against_raw"]
    verdict = "lowers" if change["high"] < 0 else "raises" if change["low"] > 0 else "hardly changes"
    by_domain = [
        [
            domain,
            *(_percent(_mean(p[name]["ece"])) for name in ("raw", "calibrated")),
            _number(_mean(p["raw"]["auroc"])),
        ]
        for domain, p in results["domains"].items()
    ]
    parts = [
        f"# Reliability of {results['drafter']} on {results['target']}",
        "Survivals a_k = c_1 * .. * c_k against whether all of 1..k were accepted. Temperatures fitted on "
        f"{results['rounds']['fit']} rounds of prompts that neither training nor evaluation uses, judged on "
        f"{results['rounds']['test']} rounds of the evaluation's prompts. ECE: 20 equal-width bins.",
        "![Reliability](reliability.png)",
        table(
            [
                "position",
                "rounds",
                "temperature",
                "ECE raw",
                "ECE calibrated",
                "AUROC",
                *(["AUROC of analytic rates"] if analytic else []),
                "Brier raw",
                "Brier calibrated",
            ],
            rows,
        ),
        f"Sequential Temperature Scaling {verdict} the mean ECE: {100 * mean_raw:.2f} % raw, {100 * mean_sts:.2f} % "
        f"calibrated, a change of {100 * change['change']:+.2f} points [{100 * change['low']:+.2f}, "
        f"{100 * change['high']:+.2f}] (95 % over prompts). "
        + _auroc_sentence(pair)
        + " (The paper, Qwen3-4B: raw 3 to 8 %, about 1 % after; AUROC 0.81 to 0.90.)",
        "## By domain (one calibration for all)",
        table(["domain", "mean ECE raw", "mean ECE calibrated", "mean AUROC"], by_domain),
        *_methods_part(results["methods"]),
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return "\n\n".join(parts) + "\n"


def _auroc_sentence(pair: dict[str, Any]) -> str:
    """Which positions rank badly, and whether confidences that are exactly what the head learns would do better."""
    counts, auroc = pair["raw"]["counts"], pair["raw"]["auroc"]
    low = [k for k, a in enumerate(auroc) if counts[k] >= _ENOUGH and not (a is not None and a > 0.75)]
    if not low:
        return f"AUROC is above 0.75 at every position with {_ENOUGH} rounds or more."
    said = f"AUROC is not above 0.75 at position {', '.join(str(k + 1) for k in low)}."
    if "analytic" in pair:
        reach = ", ".join(_number(pair["analytic"]["auroc"][k]) for k in low)
        said += (
            f" The analytic acceptance rates that the head learns to predict (Eq. 8) reach {reach} there: what is "
            "missing above that is the draw's own randomness, not a fault of the head."
        )
    return said


def _methods_part(methods: dict[str, Any]) -> list[str]:
    ordered = sorted(methods.items(), key=lambda item: item[1]["mean_ece"])
    lines = [
        [name, _percent(m["mean_ece"]), f"{_percent(m['low'])} to {_percent(m['high'])}", f"{m['mean_brier']:.4f}"]
        for name, m in ordered
    ]
    return [
        "## Methods, all fitted on the same rounds, judged on the test split",
        table(["method", "mean ECE", "95 % over prompts", "mean Brier"], lines),
        f"Lowest mean ECE here: {ordered[0][0]}. Isotonic, Platt and beta fit conditional acceptance, position by "
        "position; STS fits survivals. (An interval over prompts of an ECE lies above the ECE itself: resampling adds "
        "scatter.)",
    ]


def write_threshold(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/threshold/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    _threshold_figure(results, folder / "threshold.png")
    rows = [
        {
            "domain": domain,
            **{k: v for k, v in row.items() if k != "replayed"},
            **{f"replayed_{k}": v for k, v in row["replayed"].items()},
        }
        for domain, of_domain in results["domains"].items()
        for row in of_domain
    ]
    return write_report(folder, results, _threshold_text(results), rows)


def _threshold_figure(results: dict[str, Any], path: Path) -> None:
    domains = results["domains"]
    figure, axes = plt.subplots(1, len(domains), figsize=(4.4 * len(domains), 3.8), sharey=True, squeeze=False)
    for axis, (domain, rows) in zip(axes[0], domains.items(), strict=True):
        x = [row["threshold"] for row in rows]
        accepted = [row["accepted"] for row in rows]
        rejected = [row["verified"] - row["accepted"] for row in rows]
        axis.bar(x, accepted, width=0.07, color=CALIBRATED, label="accepted")
        axis.bar(
            x,
            rejected,
            width=0.07,
            bottom=accepted,
            color="white",
            edgecolor=RAW,
            hatch="///",
            lw=0.8,
            label="rejected",
        )
        axis.plot(
            x, [row["tokens_per_round"] for row in rows], "D-", ms=3.5, color="#333333", lw=1.2, label="tokens a round"
        )
        rate = axis.twinx()
        rate.plot(x, [100 * row["acceptance_rate"] for row in rows], "o--", ms=3.5, color="#009E73", lw=1.2)
        rate.set_ylim(0, 105)
        rate.spines[["top"]].set_visible(False)
        if axis is axes[0][-1]:
            rate.set_ylabel("acceptance rate, % (dashed)", color="#009E73")
        else:
            rate.set_yticklabels([])
        axis.set_title(domain, fontsize=11)
        axis.set_xlabel("threshold on confidence")
        axis.spines[["top"]].set_visible(False)
    axes[0][0].set_ylabel("draft tokens a round")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0.02))
    figure.suptitle(f"Static threshold, {results['drafter']} on {results['target']}", fontsize=11, y=1.01)
    save_figure(figure, path, wspace=0.18)


def _threshold_text(results: dict[str, Any]) -> str:
    rows = [
        [
            domain,
            f"{row['threshold']:.1f}",
            f"{row['tokens_per_round']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            f"{row['verified']:.2f}",
            _percent(row["acceptance_rate"]),
            f"{row['replayed']['tokens_per_round']:.2f}",
            _percent(row["replayed"]["acceptance_rate"]),
        ]
        for domain, of_domain in results["domains"].items()
        for row in of_domain
    ]
    spans = ", ".join(
        f"{domain} {_percent(of[0]['acceptance_rate'])} to {_percent(of[-1]['acceptance_rate'])}"
        for domain, of in results["domains"].items()
    )
    parts = [
        f"# Static threshold, {results['drafter']} on {results['target']}",
        "A block is cut before the first position whose raw confidence is below the threshold; 0 verifies all.",
        "![Threshold](threshold.png)",
        f"Acceptance rate from threshold 0 to 0.9: {spans}. (The paper, Qwen3-4B: chat 45.7 to 95.7 %, math 76.9 "
        "to 92.5 %, code 67.6 to 92.0 %.)",
        table(
            [
                "domain",
                "threshold",
                "tokens a round",
                "verified",
                "acceptance",
                "replayed tokens",
                "replayed acceptance",
            ],
            rows,
        ),
        "Decoded columns come from real decoding at each threshold. Replayed columns cut the blocks of one recording "
        "of whole-block rounds: the share of accepted tokens among verified ones is comparable, but a cut block ends "
        "at another place, from which whole-block rounds never drafted, so tokens a round differ where much is cut.",
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return "\n\n".join(parts) + "\n"


def write_shift(folder: Path, results: dict[str, Any]) -> Path:
    """``reports/calibration_shift/<target>/``."""
    folder.mkdir(parents=True, exist_ok=True)
    _shift_figure(results, folder / "calibration_shift.png")
    rows = [
        {
            "fitted_on": name,
            "tested_on": domain,
            "mean_ece": cell["mean_ece"],
            **{f"throughput_{c}": t for c, t in cell["throughput"].items()},
        }
        for name, of_name in results["matrix"].items()
        for domain, cell in of_name.items()
    ]
    return write_report(folder, results, _shift_text(results), rows)


def lost_throughput(matrix: dict[str, Any], name: str, domain: str) -> float:
    """Largest share of throughput lost at any concurrency against the calibration fitted on the domain itself."""
    own, other = matrix[domain][domain]["throughput"], matrix[name][domain]["throughput"]
    return max(1 - other[c] / own[c] for c in own)


def _shift_figure(results: dict[str, Any], path: Path) -> None:
    matrix = results["matrix"]
    names, domains = list(matrix), list(next(iter(matrix.values())))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.55 * len(names) + 2.2))
    grids = (
        ([[100 * matrix[n][d]["mean_ece"] for d in domains] for n in names], "mean ECE of survivals, %", "{:.1f}"),
        (
            [[100 * lost_throughput(matrix, n, d) for d in domains] for n in names],
            "throughput lost, % (worst load)",
            "{:+.1f}",
        ),
    )
    for axis, (grid, title, form) in zip(axes, grids, strict=True):
        image = axis.imshow(grid, cmap="cividis", aspect="auto")
        middle = (image.norm.vmin + image.norm.vmax) / 2
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(
                    x, y, form.format(value), ha="center", va="center", color="white" if value < middle else "black"
                )
        axis.set_xticks(range(len(domains)), domains)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel("tested on")
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("fitted on")
    save_figure(figure, path, wspace=0.3)


def _shift_text(results: dict[str, Any]) -> str:
    matrix = results["matrix"]
    domains = list(next(iter(matrix.values())))
    ece = [[n, *(_percent(matrix[n][d]["mean_ece"]) for d in domains)] for n in matrix]
    lost = [[n, *(f"{100 * lost_throughput(matrix, n, d):+.1f} %" for d in domains)] for n in matrix]
    foreign = [(matrix[n][d]["mean_ece"] - matrix[d][d]["mean_ece"], n, d) for n in domains for d in domains if n != d]
    worst, fitted, tested = max(foreign)
    costliest = max((lost_throughput(matrix, n, d), n, d) for n in domains for d in domains if n != d)
    parts = [
        f"# Calibration under a change of domain, {results['drafter']} on {results['target']}",
        "Temperatures fitted on the domain of the row, judged on the domain of the column (other prompts).",
        "![Calibration shift](calibration_shift.png)",
        "## Mean ECE of survivals",
        table(["fitted on", *domains], ece),
        f"The largest rise over a calibration of the domain's own: {100 * worst:+.1f} points, fitted on {fitted} and "
        f"used on {tested}.",
        "## Throughput lost by the asynchronous scheduler",
        "Simulated on the capacity curve of this machine with recorded outcomes, closed loop; the worst of all "
        "concurrencies, against the calibration of the domain's own.",
        table(["fitted on", *domains], lost),
        f"The costliest change: {100 * costliest[0]:+.1f} %, fitted on {costliest[1]} and used on {costliest[2]}. What "
        "is below about one percent is within the noise of a simulated run. The paper leaves this question open.",
        f"Checkpoint: {results['checkpoint']}.",
    ]
    return "\n\n".join(parts) + "\n"


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if v is not None and not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
