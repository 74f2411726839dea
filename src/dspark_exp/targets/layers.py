"""Which decoder layers of the target a drafter reads.

Ids are 0-based decoder layers; the value taken is the layer's output (Transformers hidden_states[i+1]);
-1 is the embedding. The last layer may not be tapped: its Transformers output is normed, a hook's is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_exp.errors import ConfigError


def default_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spread ids as in the released configs: 36 layers, 5 taps -> [1, 9, 17, 25, 33].

    Raises:
        ConfigError: more taps than layers that may be tapped.
    """
    first, last = min(1, num_layers - 2), max(num_layers - 3, min(1, num_layers - 2))
    if num_taps > num_layers - 1 or num_taps < 1:
        raise ConfigError(
            f"Cannot tap {num_taps} layers of a target with {num_layers}; choose 1 to {num_layers - 1} "
            "(target.num_feature_layers)."
        )
    if num_taps > last - first + 1:
        first, last = 0, num_layers - 2
    if num_taps == 1:
        return (last,)
    return tuple(round(first + (last - first) * index / (num_taps - 1)) for index in range(num_taps))


def resolve_layer_ids(layer_ids: Sequence[int] | None, num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Given ids, checked, or the default spread.

    Raises:
        ConfigError: ids out of range, repeated, or not increasing.
    """
    if layer_ids is None:
        return default_layer_ids(num_layers, num_taps)
    ids = tuple(int(i) for i in layer_ids)
    if not ids or any(i < -1 or i > num_layers - 2 for i in ids) or list(ids) != sorted(set(ids)):
        raise ConfigError(
            f"target.layer_ids={list(ids)} does not fit a target with {num_layers} layers: give increasing ids "
            f"from -1 (embeddings) to {num_layers - 2} (the last layer may not be tapped)."
        )
    return ids
