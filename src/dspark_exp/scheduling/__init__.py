"""Verification under load: the capacity curve and the schedulers that spend it. Numbers only, no models."""

from dspark_exp.scheduling.asynchronous import AsyncScheduler
from dspark_exp.scheduling.capacity import CapacityCurve, CapacityTable, Rounds, read_table
from dspark_exp.scheduling.prefix import PrefixScheduler, Ranking, greedy_prefix, need_confidence, rank, survivals

__all__ = [
    "AsyncScheduler",
    "CapacityCurve",
    "CapacityTable",
    "PrefixScheduler",
    "Ranking",
    "Rounds",
    "greedy_prefix",
    "need_confidence",
    "rank",
    "read_table",
    "survivals",
]
