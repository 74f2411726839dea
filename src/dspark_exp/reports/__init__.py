"""Tables and figures from results alone."""

from dspark_exp.reports.build import build_report, merged
from dspark_exp.reports.tables import pooled_by_domain, print_table

__all__ = ["build_report", "merged", "pooled_by_domain", "print_table"]
