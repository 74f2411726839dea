"""LightningModules and data for drafter training."""

from dspark_exp.training.callbacks import DataWait, DraftDiagnostics
from dspark_exp.training.data_module import DrafterData, as_features, collate
from dspark_exp.training.modules import BlockDrafterModule, DrafterModule, Eagle3Module, Optimization
from dspark_exp.training.turns import SharedFeatures, Stopped, TakeTurns, Turns

__all__ = [
    "BlockDrafterModule",
    "DataWait",
    "DraftDiagnostics",
    "DrafterData",
    "DrafterModule",
    "Eagle3Module",
    "Optimization",
    "SharedFeatures",
    "Stopped",
    "TakeTurns",
    "Turns",
    "as_features",
    "collate",
]
