"""Every report again from its results.json alone. In: a folder of reports. Out: the same folder, and its index page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_exp.errors import DataError
from dspark_exp.reports.build import write_files
from dspark_exp.reports.capacity import write_capacity_report
from dspark_exp.reports.confidence import write_reliability, write_shift, write_threshold
from dspark_exp.reports.index_page import write_index
from dspark_exp.reports.latency import write_latency
from dspark_exp.reports.load import write_early_exit, write_load_adaptive, write_pareto, write_staleness
from dspark_exp.reports.search import write_search_files
from dspark_exp.reports.sweeps import write_sweep_files

_WRITERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {  # by task, in older results by experiment
    "table1": lambda folder, results: write_files(results, folder),
    "capacity": lambda folder, results: write_capacity_report(folder, results["target"], results),
    "reliability": write_reliability,
    "reliability_greedy": write_reliability,
    "threshold": write_threshold,
    "calibration_shift": write_shift,
    "pareto": write_pareto,
    "load_adaptive": write_load_adaptive,
    "latency": write_latency,
    "early_exit": write_early_exit,
    "staleness": write_staleness,
}


def rebuild(reports: Path) -> tuple[list[Path], list[Path]]:
    """Write every report of ``<reports>/<experiment>/<target>/`` again, then ``<reports>/index.html``.

    Returns:
        Folders that were rebuilt, and folders whose results no writer knows: those are left as they are.

    Raises:
        DataError: nothing there, or a results.json that cannot be read; the message names it.
    """
    found = sorted(reports.glob("*/*/results.json"))
    if not found:
        raise DataError(f"No <experiment>/<target>/results.json in {reports}: run an experiment, or set paths.reports.")
    rebuilt, left = [], []
    for path in found:
        try:
            results = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is not JSON ({error}); run its experiment again.") from error
        named = results.get("task") or results.get("experiment") or path.parent.parent.name
        write = _WRITERS.get(named)
        if "sweep" in results:
            write_sweep_files(results, path.parent)
        elif "search" in results:
            write_search_files(results, path.parent)
        elif write is not None:
            write(path.parent, results)
        elif "rows" in results and "training" in results:
            write_files(results, path.parent)  # a multirun with a name of its own
        else:
            left.append(path.parent)
            continue
        rebuilt.append(path.parent)
    write_index(reports)
    return rebuilt, left
