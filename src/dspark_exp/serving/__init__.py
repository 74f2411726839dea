"""A continuous-batching engine on a target and a drafter, traffic for it, and a simulator of both."""

from dspark_exp.serving.engine import Engine, QueueFull, Ticket
from dspark_exp.serving.simulator import SimulatedRequest, simulate
from dspark_exp.serving.traffic import Arrivals, LoadResult, Served, drive

__all__ = [
    "Arrivals",
    "Engine",
    "LoadResult",
    "QueueFull",
    "Served",
    "SimulatedRequest",
    "Ticket",
    "drive",
    "simulate",
]
