"""Checkpoints that travel: the released layout read and written, exports for serving engines, each read back."""

from dspark_exp.interop.deepspec import DeepSpecConfig, load_weights, read_config, read_drafter
from dspark_exp.interop.export import Exported, draft_greedily, export_drafter
from dspark_exp.interop.layouts import READERS, layout_for
from dspark_exp.interop.minimal_reader import Draft, MinimalReader

__all__ = [
    "READERS",
    "DeepSpecConfig",
    "Draft",
    "Exported",
    "MinimalReader",
    "draft_greedily",
    "export_drafter",
    "layout_for",
    "load_weights",
    "read_config",
    "read_drafter",
]
