"""Checkpoints that travel: the released (DeepSpec) layout, read and written."""

from dspark_exp.interop.deepspec import DeepSpecConfig, read_config, read_drafter, write_drafter

__all__ = ["DeepSpecConfig", "read_config", "read_drafter", "write_drafter"]
