"""Recipe: an open loop on the real engine. Requests arrive on a clock; how long do users wait, how fast do they read.

The same requests arrive at the same times for every arm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_exp.reports.latency import write_latency
from dspark_exp.serving import Arrivals, LoadResult
from dspark_exp.tasks.load import Bench, median_of
from dspark_exp.tasks.train_eval import Job

log = logging.getLogger(__name__)
_SPELLS = 20  # quiet and busy ones of a bursty test


def run_latency(job: Job) -> Path:
    """Time to first token and speed of each user against the rate of requests, all arms, steady and bursty."""
    bench, wanted = Bench.of(job), job.config.load
    arms = [bench.arm(name) for name in wanted.arms]
    num_rows = max(wanted.concurrency)
    requests = bench.requests(num_rows)
    (plain,) = bench.serve([bench.arm("plain")], num_rows, requests)
    served_per_s = len(plain.served) / plain.seconds
    rows = []
    for kind in wanted.arrivals:
        for share in wanted.rates:
            rate = share * served_per_s
            stream = Arrivals(rate, kind, spell_s=len(requests) / rate / _SPELLS)
            runs: dict[str, list[LoadResult]] = {arm.name: [] for arm in arms}
            for turn in range(wanted.repeats):
                order = [arms[(place + turn) % len(arms)] for place in range(len(arms))]  # another one goes first
                arrivals = stream.times(len(requests), seed=turn).tolist()
                for arm, result in zip(order, bench.serve(order, num_rows, requests, None, arrivals), strict=True):
                    runs[arm.name].append(result)
            common = {"arrivals": kind, "share": share, "rate": rate}
            rows += [{"arm": name, **common, **_summary(results)} for name, results in runs.items()]
            shown = ", ".join(f"{name} {1000 * _p90(results):.0f}" for name, results in runs.items())
            log.info("%s, %.1f requests/s, 90 %% have their first token after ms: %s", kind, rate, shown)
    about = {"served_per_s": served_per_s, "num_rows": num_rows, "rows": rows}
    return write_latency(bench.folder, bench.header() | about)


def _summary(results: Sequence[LoadResult]) -> dict[str, Any]:
    summaries = [result.summary() for result in results]
    waits = {"waits": [one["first_token_s_p90"] for one in summaries]}
    speeds = {"speeds": [one["tokens_per_s_per_user"] for one in summaries]}
    return median_of(summaries) | waits | speeds


def _p90(results: Sequence[LoadResult]) -> float:
    return float(median_of([result.summary() for result in results])["first_token_s_p90"])
