"""A continuous-batching engine on a target and a drafter, traffic for it, and a simulator of both."""

from dspark_exp.serving.engine import Engine, QueueFull, Ticket
from dspark_exp.serving.simulator import SimulatedRequest, simulate
from dspark_exp.serving.traffic import (
    Arrivals,
    ClosedLoop,
    LoadResult,
    OpenLoop,
    Served,
    Stopwatch,
    drive,
    serve_in_turns,
)

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "Engine",
    "LoadResult",
    "OpenLoop",
    "QueueFull",
    "Served",
    "SimulatedRequest",
    "Stopwatch",
    "Ticket",
    "drive",
    "serve_in_turns",
    "simulate",
]
