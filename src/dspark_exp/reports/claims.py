"""What the paper claims, against what was measured: shown, not shown, contradicted, or not to be shown at this scale.

In: results of a report. Out: verdicts. A claim is shown where the whole 95% interval of the difference is on its side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_exp.reports.intervals import Interval
from dspark_exp.reports.tables import Pooled, by_drafter, gain, macro_averages, pooled_by_domain

MARGINAL = 0.05  # relative difference that still counts as marginal


@dataclass(frozen=True)
class Verdict:
    """A claim with the relative difference that decides it."""

    claim: str
    difference: Interval | None  # relative; None where an arm is missing
    num_runs: int
    verdict: str  # shown | not shown | contradicted | missing | not at this scale


OUT_OF_SCALE = tuple(
    Verdict(claim, None, 0, "not at this scale")
    for claim in (
        "Accepted lengths of Table 1 on Qwen3-4B/8B/14B and Gemma4-12B after ten epochs of 1.3 million rows.",
        "Speed per user 60 to 85 % above MTP-1 at matched throughput in production (Figure 7).",
        "The sequential head costs 0.2 to 1.3 % of a round at batch 128 on a GPU (Figure 4, right).",
    )
)


def judge(difference: Interval, margin: float = 0.0) -> str:
    """With a margin the claim is equality within it, else that the difference is above zero."""
    if margin:
        if -margin < difference.low and difference.high < margin:
            return "shown"
        return "contradicted" if difference.low > margin or difference.high < -margin else "not shown"
    if difference.low > 0:
        return "shown"
    return "contradicted" if difference.high < 0 else "not shown"


def percent(difference: Interval | None) -> str:
    """``+4.1 % [+2.0, +6.3]``."""
    if difference is None:
        return ""
    return f"{100 * difference.mean:+.1f} % [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def table1_verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Claims about the drafters of Table 1, on rows of one training run each (intervals over prompts)."""
    groups = by_drafter(rows)
    means = {name: macro_averages(group) for name, group in groups.items()}
    found = []
    for baseline, title in (("dflash", "DFlash"), ("eagle3", "Eagle3")):
        for domain in means.get("dspark_markov", {}):
            if domain != "all" and domain in means.get(baseline, {}):
                difference = Interval(*gain(means["dspark_markov"][domain], means[baseline][domain]))
                claim = f"DSpark accepts more than {title} on {domain} (Table 1)."
                found.append(Verdict(claim, difference, 1, judge(difference)))
    if {"dspark_rnn", "dspark_markov"} <= set(means):
        difference = Interval(*gain(means["dspark_rnn"]["all"], means["dspark_markov"]["all"]))
        claim = f"The RNN head is only marginally better than the Markov head (within {MARGINAL:.0%})."
        found.append(Verdict(claim, difference, 1, judge(difference, MARGINAL)))
    if {"dflash", "dspark_markov"} <= set(groups):
        found += _decay_verdicts(pooled_by_domain(groups["dflash"]), pooled_by_domain(groups["dspark_markov"]))
    return found


def _decay_verdicts(dflash: dict[str, Pooled], dspark: dict[str, Pooled]) -> list[Verdict]:
    """Suffix decay: conditional acceptance at the last position that both reached, against the first."""
    found = []
    for domain, theirs in dflash.items():
        ours = dspark.get(domain)
        if ours is None:
            continue
        both = zip(ours.shown, theirs.shown, strict=True)
        reached = [k for k, pair in enumerate(both) if None not in pair]
        if len(reached) < 2:
            continue
        last = reached[-1]
        falls = _ratio(theirs, reached[0], theirs, last)
        claim = f"DFlash's conditional acceptance falls along the block on {domain} (position {last + 1} against 1)."
        found.append(Verdict(claim, falls, 1, judge(Interval(-falls.mean, -falls.high, -falls.low))))
        above = _ratio(theirs, last, ours, last)
        claim = f"DSpark's conditional acceptance is higher at position {last + 1} on {domain} (Figure 2)."
        found.append(Verdict(claim, above, 1, judge(above)))
    return found


def _ratio(base: Pooled, at: int, other: Pooled, there: int) -> Interval:
    """Relative difference of two acceptances; the interval takes the far ends of both (wider than 95 %)."""
    low, middle, high = ([line[k] or 0.0 for line, k in ((side[0], at), (side[1], there))] for side in (
        (base.low, other.low), (base.conditional, other.conditional), (base.high, other.high)
    ))  # fmt: skip
    return Interval(middle[1] / middle[0] - 1, low[1] / high[0] - 1, high[1] / low[0] - 1)
