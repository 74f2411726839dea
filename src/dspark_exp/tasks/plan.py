"""Recipe: what the jobs of a sweep would take (``sweep.plan``), the target's features counted once for jobs that share
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark_exp.hashing import short_digest
from dspark_exp.tasks.auto_shard import with_shard_chosen
from dspark_exp.tasks.estimate import chosen_estimate
from dspark_exp.tasks.together import company_key
from dspark_exp.tasks.train_eval import Job, finished_results

_PARTS = ("disk_gb", "hours")


def planned(job: Job) -> dict[str, Any]:
    """Gigabytes and hours of a job, without what it shares; that beside it, and what the sharing jobs have in common.

    Stored and bounded features are shared on disk, and stored ones in time. Jobs that train together
    (``sweep.shared_target``) share every pass of the target.
    """
    plan = asdict(chosen_estimate(with_shard_chosen(job.config)))
    features = {"disk_gb": plan.pop("features_gb"), "hours": plan.pop("features_hours")}
    is_together = job.config.sweep.shared_target
    if not is_together and plan["mode"] != "stored":
        features["hours"] = 0.0  # every job runs the target anew
    key = company_key(job) if is_together else short_digest([job.plain[n] for n in ("target", "data", "features")])
    own = {name: plan[name] - features[name] for name in _PARTS}
    return {**plan, **own, "features": features, "shares": key, "is_done": finished_results(job) is not None}


def totals(plans: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Gigabytes of disk and hours of jobs together."""
    features = {plan["shares"]: plan["features"] for plan in plans}
    return {name: sum(item[name] for item in [*plans, *features.values()]) for name in _PARTS}


def print_plan(jobs: Sequence[dict[str, Any]]) -> None:
    """A line for each job, one for the features of jobs that share them, and one for everything that is still to do."""
    table = Table("job", "disk", "memory", "hours", "done", title="Planned (evaluation comes on top)")
    for job in jobs:
        plan = job["plan"]
        table.add_row(job["job"], *_cells(plan, f"{plan['memory_gb']:.2f} GB"), "yes" if plan["is_done"] else "")
    left = [job["plan"] for job in jobs if not job["plan"]["is_done"]]
    sharing = Counter(plan["shares"] for plan in left)
    features = {plan["shares"]: plan["features"] for plan in left if any(plan["features"].values())}
    table.add_section()
    for key, item in features.items():
        table.add_row(f"target features of {_count(sharing[key])} (none if stored before)", *_cells(item, ""), "")
    most = max((plan["memory_gb"] for plan in left), default=0.0)
    table.add_section()
    table.add_row(f"{_count(len(left))} to do", *_cells(totals(left), f"{most:.2f} GB"), "")
    Console().print(table)


def _cells(item: dict[str, Any], memory: str) -> tuple[str, str, str]:
    return f"{item['disk_gb']:.2f} GB", memory, f"{item['hours']:.2f}"


def _count(jobs: int) -> str:
    return f"{jobs} job" if jobs == 1 else f"{jobs} jobs"
