"""The frozen target model: adapter, supported families, ragged key/value cache."""

from dspark_exp.targets.adapter import Target, load_target
from dspark_exp.targets.layers import default_layer_ids, resolve_layer_ids
from dspark_exp.targets.ragged import RaggedKVCache

__all__ = ["RaggedKVCache", "Target", "default_layer_ids", "load_target", "resolve_layer_ids"]
