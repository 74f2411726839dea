"""The frozen target model: adapter, supported families, ragged key/value cache."""

from dspark_exp.targets.adapter import (
    Target,
    load_target,
    location_of,
    read_target_config,
    read_tokenizer,
    target_of,
)
from dspark_exp.targets.families import read_architecture
from dspark_exp.targets.layers import default_layer_ids, resolve_layer_ids
from dspark_exp.targets.ragged import RaggedKVCache
from dspark_exp.targets.self_test import check_target
from dspark_exp.targets.sharded import rank_mesh, shard_over_ranks
from dspark_exp.targets.tensor_parallel import cut_over_ranks, parts_allowed
from dspark_exp.targets.vocabulary import VocabSpec, turn_end_id

__all__ = [
    "RaggedKVCache",
    "Target",
    "VocabSpec",
    "check_target",
    "cut_over_ranks",
    "default_layer_ids",
    "load_target",
    "location_of",
    "parts_allowed",
    "rank_mesh",
    "read_architecture",
    "read_target_config",
    "read_tokenizer",
    "resolve_layer_ids",
    "shard_over_ranks",
    "target_of",
    "turn_end_id",
]
