"""Processes of one job on several devices: started by torchrun, counted, joined."""

from dspark_exp.launch.ranks import barrier, before_meeting, gathered, locked_together, num_ranks, rank, share
from dspark_exp.launch.torchrun import multi_node_commands, run_on_ranks

__all__ = [
    "barrier",
    "before_meeting",
    "gathered",
    "locked_together",
    "multi_node_commands",
    "num_ranks",
    "rank",
    "run_on_ranks",
    "share",
]
