"""Training objectives, evaluated over the vocabulary in chunks."""

from dspark_exp.objectives.fused import SlotLosses, slot_losses
from dspark_exp.objectives.losses import BlockObjective, ObjectiveResult, TrainingTimeTestObjective

__all__ = ["BlockObjective", "ObjectiveResult", "SlotLosses", "TrainingTimeTestObjective", "slot_losses"]
