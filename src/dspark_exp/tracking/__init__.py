"""MLflow: one parent run per sweep, one child per job."""

from dspark_exp.tracking.history import FinishedJob, History, read_curves
from dspark_exp.tracking.mlflow_runs import JobTracker, TrackedData, close_parent_run, open_parent_run

__all__ = [
    "FinishedJob",
    "History",
    "JobTracker",
    "TrackedData",
    "close_parent_run",
    "open_parent_run",
    "read_curves",
]
