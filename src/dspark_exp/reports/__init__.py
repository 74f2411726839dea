"""Tables and figures from results alone."""

from dspark_exp.reports.build import build_report, merged
from dspark_exp.reports.search import build_search_report, print_search, trial
from dspark_exp.reports.sweeps import build_sweep_report, print_sweep
from dspark_exp.reports.tables import pooled_by_domain, print_table

__all__ = [
    "build_report",
    "build_search_report",
    "build_sweep_report",
    "merged",
    "pooled_by_domain",
    "print_search",
    "print_sweep",
    "print_table",
    "trial",
]
