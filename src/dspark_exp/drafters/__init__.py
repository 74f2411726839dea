"""Drafters: parallel backbone, sequential heads, confidence head, and the Eagle3 baseline."""

from dspark_exp.drafters.block import BlockDrafter, BlockOutput, DFlashDrafter, DSparkDrafter
from dspark_exp.drafters.eagle3 import Eagle3Drafter
from dspark_exp.drafters.geometry import in_dtype

__all__ = ["BlockDrafter", "BlockOutput", "DFlashDrafter", "DSparkDrafter", "Eagle3Drafter", "in_dtype"]
