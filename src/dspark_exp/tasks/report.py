"""Recipe: every report again from its results.json, and one page over all of them."""

from __future__ import annotations

import logging
from pathlib import Path

from dspark_exp.reports.rebuild import rebuild
from dspark_exp.schema import ExperimentConfig

log = logging.getLogger(__name__)


def run_report(config: ExperimentConfig) -> None:
    """``task=report``.

    Raises:
        DataError: no results, or unreadable ones.
    """
    folder = Path(config.paths.reports)
    rebuilt, left = rebuild(folder)
    for path in left:
        log.info("Left as it is: %s", path)
    log.info("Rebuilt %d reports; page: %s", len(rebuilt), folder / "index.html")
