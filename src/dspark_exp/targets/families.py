"""What each model family does in its own way, read from its config. A family that is not here is refused.

In: a Transformers config, maybe with a nested text config. Out: the facts that drafting needs. Knows no weights.
The rest of the adapter contract needs no facts: the embedding scale sits in the target's embedding module, windows
and RoPE by layer type in its layers (the ragged attention receives each layer's window), the final norm in its body.
"""

from __future__ import annotations

from typing import Any

from dspark_exp.contracts import Architecture
from dspark_exp.errors import TargetError

FAMILIES = ("qwen3", "llama", "gemma3", "gemma4")
_FAMILY_OF = {
    "qwen3": "qwen3",
    "llama": "llama",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}
_READABLE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size",
)  # fmt: skip
_DECLARED = (
    "embedding scale", "final norm", "logit soft cap", "attention windows by layer", "RoPE by layer type",
    "key/value width by layer", "end-of-turn token",
)  # fmt: skip


def text_config(config: Any) -> Any:
    """The language model's own config, which multimodal families nest."""
    return config.get_text_config(decoder=True)


def text_body(model: Any) -> Any:
    """The stack of decoder layers with its final norm, which multimodal families nest."""
    return getattr(model.model, "language_model", model.model)


def read_architecture(config: Any) -> Architecture:
    """The facts of a supported family.

    Raises:
        TargetError: an unknown family (with the list of what is missing), or a variant whose maths is not supported.
    """
    family = _FAMILY_OF.get(config.model_type)
    text = text_config(config)
    if family is None:
        absent = [name for name in _READABLE if getattr(text, name, None) is None]
        lacking = f" Its config does not say {', '.join(absent)}." if absent else ""
        raise TargetError(
            f"Target family {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}. To add it, "
            f"state in targets/families.py its {', '.join(_DECLARED)}, and add it to the conformance tests.{lacking}"
        )
    _refuse_variants(text, config.model_type)
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    layer_kv = tuple(_kv_of(text, index) for index in range(text.num_hidden_layers))
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    rope = dict(text.rope_parameters)
    is_gemma4 = family == "gemma4"
    return Architecture(
        family=family,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=layer_kv[full][0],
        head_dim=layer_kv[full][1],
        intermediate_size=text.intermediate_size,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=dict(rope.get("full_attention", rope)),
        max_position_embeddings=text.max_position_embeddings,
        layer_kv=layer_kv,
        layer_windows=tuple(text.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        body="gemma4" if is_gemma4 else "qwen3",
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        keys_are_values=is_gemma4 and bool(getattr(text, "attention_k_eq_v", False)),
    )


def _refuse_variants(text: Any, model_type: str) -> None:
    known = {"full_attention", "sliding_attention"}
    other = sorted(set(getattr(text, "layer_types", None) or []) - known)
    if other:
        raise TargetError(f"This {model_type} has layers of type {', '.join(other)}; supported are {', '.join(known)}.")
    if getattr(text, "attn_logit_softcapping", None):
        raise TargetError(f"This {model_type} soft-caps attention scores (attn_logit_softcapping): not supported.")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise TargetError(f"This {model_type} attends in both directions: it is no autoregressive target.")


def _kv_of(text: Any, index: int) -> tuple[int, int]:
    """Key/value heads and head width of a layer; Gemma 4's full-attention layers have their own."""
    layer = text.per_layer_config[index] if getattr(text, "per_layer_config", None) else text
    width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return int(layer.num_key_value_heads), int(width)
