"""The files of an experiment's report: results.json, a CSV, report.md."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_report(
    folder: Path, results: dict[str, Any], text: str, rows: Sequence[dict[str, Any]], csv_name: str = "table.csv"
) -> Path:
    """Write them; returns the report's path. The keys of the first row are the CSV's columns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(_without_nan(results), indent=1) + "\n")
    with (folder / csv_name).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    path = folder / "report.md"
    path.write_text(text)
    return path


def _without_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
