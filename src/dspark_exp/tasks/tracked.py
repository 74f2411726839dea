"""What MLflow is told of a finished job, by the run itself or later by ``task=track``."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dspark_exp.hashing import short_digest
from dspark_exp.reports import pooled_by_domain
from dspark_exp.tracking import TrackedData

ENVIRONMENT = "environment.txt"


def tags_of(results: dict[str, Any]) -> dict[str, str]:
    """Labels to search runs by."""
    return {"drafter": results["drafter"], "target": results["target"], "experiment": results["experiment"]}


def files_of(folder: Path) -> list[Path]:
    """Results, resolved config and environment of a job."""
    return [path for name in ("results.json", "config.json", ENVIRONMENT) if (path := folder / name).exists()]


def write_environment(folder: Path) -> None:
    """Names and versions of all installed packages."""
    found = {f"{package.name}=={package.version}" for package in distributions()}
    (folder / ENVIRONMENT).write_text("\n".join(sorted(found, key=str.lower)) + "\n", encoding="utf-8")


def final_metrics(results: dict[str, Any]) -> dict[str, float]:
    """Final figures under names that compare well: tau/<benchmark>, acceptance/pos_k, ece/pos_k."""
    rows = results["rows"]
    metrics = {f"tau/{row['benchmark']}": row["tau"] for row in rows}
    metrics["tau/all"] = sum(metrics.values()) / len(metrics)
    (joined,) = pooled_by_domain([{**row, "domain": "all"} for row in rows]).values()
    metrics |= {f"acceptance/pos_{k + 1}": value for k, value in enumerate(joined.conditional) if value is not None}
    for domain, row in pooled_by_domain(results["rows"]).items():
        metrics[f"tau_{domain}"] = row.tau
        for k, value in enumerate(row.conditional):
            if value is not None:
                metrics[f"acceptance_{domain}/pos_{k + 1}"] = value
    for name, key in (("raw", "confidence"), ("calibrated", "confidence_calibrated")):
        for k, value in enumerate(_mean_by_position([row[key]["ece"] for row in results["rows"] if key in row])):
            metrics[f"ece/pos_{k + 1}_{name}"] = value
    return metrics


def datasets_of(results: dict[str, Any]) -> list[TrackedData]:
    """What was trained on and the prompts of every benchmark, by their hashes."""
    origin = results["provenance"]
    prompts = origin["evaluation"]["prompts_sha256"]
    found = [TrackedData(name, digest, "evaluation", {}) for name, digest in prompts.items()]
    if "train" in origin["data"]:
        summary = origin["data"]["train"]
        digest = origin["data"].get("prompts_sha256") or short_digest(summary)
        found.insert(0, TrackedData(str(origin["data"].get("path") or "conversations"), digest, "training", summary))
    return found


def _mean_by_position(rows: list[list[float | None]]) -> list[float]:
    known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) for column in known if column]
