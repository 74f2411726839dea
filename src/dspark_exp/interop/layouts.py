"""What each reader wants to find: config fields and tensor names, or the reason why it cannot read a drafter.

In: a drafter and its target. Out: config.json as a dictionary, tensors by name, and every convention in words.
Knows nothing about files. Follows the export matrix in CONTRIBUTING (section "Checkpoints that travel"); field names
are the readers' own, read in their code of August and September 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from dspark_exp.drafters import BlockDrafter, Eagle3Drafter
from dspark_exp.errors import CheckpointError
from dspark_exp.targets import Target

HEAD_NAMES = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
SHARED = ("embed_tokens.weight", "lm_head.weight")  # may be in the file or borrowed from the target
_NULL_RANK = 16  # width of the head that adds exactly nothing


@dataclass(frozen=True)
class Layout:
    """``layer_ids``: the field that carries them -> its value; ``offset``: what that field adds to our ids."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layer_ids: dict[str, list[int]]
    offset: int
    serve: str
    notes: tuple[str, ...] = ()


def layout_for(reader: str, drafter: nn.Module, target: Target) -> Layout:
    """The layout of ``reader``.

    Raises:
        CheckpointError: an unknown reader, or one that cannot read this drafter; the message says why.
    """
    if reader not in READERS:
        raise CheckpointError(f"export.to={reader!r} is unknown; choose from {', '.join(READERS)}.")
    if target.facts.family == "gemma3":
        raise CheckpointError(
            "No reader has a drafter class for Gemma 3 targets: their Qwen3 class would apply neither the embedding "
            "scale nor the soft cap."
        )
    window = getattr(getattr(drafter, "backbone", None), "window", None)
    if window is not None:
        raise CheckpointError(
            f"No reader's layout has a field for drafter.network.window={window} with non-causal blocks: it would "
            "attend to the whole context and draft something else. Train with drafter.network.window=null to export."
        )
    return READERS[reader](drafter, target)


def deepspec(drafter: nn.Module, target: Target) -> Layout:
    """The released layout: embedding and LM head included; DFlash is the same class with rank 0."""
    config = _reference_config(drafter, target)
    ids = list(target.facts.layer_ids)
    tensors = _own_tensors(drafter) | _shared_tensors(target)
    return Layout(config, tensors, {"target_layer_ids": ids}, 0, "python -m dspark_exp drafter.init_from=DIR")


def vllm(drafter: nn.Module, target: Target) -> Layout:
    """Native classes: Qwen3DSparkModel, Gemma4DSparkModel, Eagle3Qwen3ForCausalLM."""
    facts = target.facts
    if isinstance(drafter, Eagle3Drafter):
        if facts.body == "gemma4":
            raise CheckpointError("vLLM has no class for Eagle3 drafters with Gemma 4 layers.")
        return _vllm_eagle3(drafter, target)
    assert isinstance(drafter, BlockDrafter)
    if drafter.head_kind not in (None, "markov"):
        raise CheckpointError(
            f"vLLM's DSpark class has the vanilla Markov head only; this drafter has the {drafter.head_kind} head. "
            "Use export.to=sglang or deepspec."
        )
    config, tensors, notes = _null_headed(drafter, target)
    if facts.body == "gemma4":  # this class does not share the target's embedding and head
        tensors |= _shared_tensors(target)
        notes = (*notes, "the Markov bias may be soft-capped by vLLM on its own: not measured here")
    config |= {"sample_from_anchor": True, "dspark_bonus_anchor": False, "draft_vocab_size": facts.vocab_size}
    config["dflash_config"] = _nested(config)
    ids = {name: list(facts.layer_ids) for name in ("target_layer_ids", "dflash_config.target_layer_ids")}
    return Layout(config, tensors, ids, 0, _vllm_command("dspark", drafter.block_size), notes)


def sglang(drafter: nn.Module, target: Target) -> Layout:
    """Qwen3DSparkModel with every field at top level and in ``dflash_config``; the target's embedding and head."""
    facts = target.facts
    if isinstance(drafter, Eagle3Drafter):
        raise CheckpointError(
            "SGLang's Eagle3 class drops the query and key norms of this drafter without a word; use export.to=vllm."
        )
    assert isinstance(drafter, BlockDrafter)
    if facts.body == "gemma4":
        raise CheckpointError("SGLang has no confirmed drafter class for Gemma 4 targets; use export.to=vllm.")
    if -1 in facts.layer_ids:
        raise CheckpointError("SGLang cannot tap the embedding (layer id -1); train with other target.layer_ids.")
    config, tensors, notes = _null_headed(drafter, target)
    config |= {"sample_from_anchor": True}
    config["dflash_config"] = _nested(config) | {"projector_type": "dspark"}
    ids = {name: list(facts.layer_ids) for name in ("target_layer_ids", "dflash_config.target_layer_ids")}
    gamma = drafter.block_size
    serve = (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm DSPARK "
        f"--speculative-draft-model-path DIR --speculative-dspark-block-size {gamma} "
        f"--speculative-num-draft-tokens {gamma + 1}"
    )
    if drafter.confidence_head is None:
        notes = (*notes, "no confidence head: start the server with SGLANG_RAGGED_VERIFY_MODE=static")
    return Layout(config, tensors, ids, 0, serve, notes)


def speculators(drafter: nn.Module, target: Target) -> Layout:
    """The container that vLLM serves by itself; layer ids count from the embedding."""
    facts = target.facts
    if facts.body == "gemma4":
        raise CheckpointError("speculators has no Gemma 4 drafter layers; use export.to=vllm.")
    is_eagle = isinstance(drafter, Eagle3Drafter)
    body = _reference_config(drafter, target)
    gamma = int(drafter.block_size)  # type: ignore[arg-type]
    algorithm = "eagle3" if is_eagle else "dspark"
    ids = [i + 1 for i in facts.layer_ids]
    layer_keys = set(Qwen3Config().to_dict()) - {"architectures"}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if is_eagle else "DSparkSpeculator"],
        "speculators_model_type": algorithm,
        "transformer_layer_config": {key: value for key, value in body.items() if key in layer_keys},
        "draft_vocab_size": facts.vocab_size,
        "target_hidden_size": facts.hidden_size,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": gamma}],
            "verifier": {"name_or_path": _name_or_path(target), "architectures": [type(target.model).__name__]},
        },
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    shared = _shared_tensors(target)
    if is_eagle:
        field = "eagle_aux_hidden_state_layer_ids"
        config |= _EAGLE3_NORMS | {field: ids}
        return Layout(config, _own_tensors(drafter) | shared, {field: ids}, 1, "vllm serve DIR")
    assert isinstance(drafter, BlockDrafter)
    body, tensors, notes = _null_headed(drafter, target)
    carried = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    config |= {name: body[name] for name in carried}
    config |= {
        "aux_hidden_state_layer_ids": ids,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "confidence_head_with_markov": body.get("confidence_head_with_markov", False),
    }
    if drafter.head_kind in ("gated", "rnn"):
        notes = (
            *notes,
            f"vLLM reads vanilla Markov heads only: the {drafter.head_kind} head is for the package itself",
        )
    tensors |= shared
    return Layout(config, tensors, {"aux_hidden_state_layer_ids": ids}, 1, "vllm serve DIR", notes)


READERS: dict[str, Callable[[nn.Module, Target], Layout]] = {
    "deepspec": deepspec,
    "speculators": speculators,
    "vllm": vllm,
    "sglang": sglang,
}
_EAGLE3_NORMS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def _vllm_eagle3(drafter: Eagle3Drafter, target: Target) -> Layout:
    facts = target.facts
    ids = [i + 1 for i in facts.layer_ids]
    config = _reference_config(drafter, target) | _EAGLE3_NORMS
    del config["target_layer_ids"]  # the reader would take it instead, in another convention
    config |= {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_layers": len(ids),
        "num_aux_hidden_states": len(ids),
        "draft_vocab_size": facts.vocab_size,
        "target_hidden_size": facts.hidden_size,
        "eagle_config": {"use_aux_hidden_state": True},
    }
    # this class holds an LM head of its own: the full vocabulary, so no draft-to-target map
    tensors = _own_tensors(drafter) | {"lm_head.weight": target.head.lm_head.weight}
    serve = _vllm_command("eagle3", drafter.block_size)
    return Layout(config, tensors, {"eagle_aux_hidden_state_layer_ids": ids}, 1, serve)


def _null_headed(drafter: BlockDrafter, target: Target) -> tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]:
    """Config and tensors; an anchor-first DFlash drafter becomes DSpark with a head that adds exactly nothing."""
    config, tensors = _reference_config(drafter, target), _own_tensors(drafter)
    if drafter.markov_head is not None:
        return config, tensors, ()
    if drafter.confidence_head is not None:
        raise CheckpointError("A confidence head without a Markov head fits no engine's DSpark class.")
    like = drafter.backbone.fc.weight
    null = {"markov_head.markov_w1.weight": 1, "markov_head.markov_w2.weight": 2}
    tensors |= {name: like.new_zeros(target.facts.vocab_size, _NULL_RANK) for name in null}
    config |= {"markov_rank": _NULL_RANK, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return config, tensors, ("anchor-first DFlash, written as DSpark with a Markov head of zeros",)


def _reference_config(drafter: nn.Module, target: Target) -> dict[str, Any]:
    facts = target.facts
    is_eagle = isinstance(drafter, Eagle3Drafter)
    layers = int(drafter.num_layers)  # type: ignore[arg-type]
    config = _body_config(drafter, target) | {
        "num_hidden_layers": layers,
        "num_target_layers": facts.num_layers,
        "intermediate_size": drafter.geometry.intermediate_size,  # type: ignore[union-attr]
        "target_layer_ids": list(facts.layer_ids),
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    family = "Gemma4" if facts.body == "gemma4" else "Qwen3"
    if is_eagle:
        return config | {
            "architectures": [f"{family}Eagle3Model"],
            "ttt_length": drafter.block_size,
            "draft_num_hidden_layers": 1,
        }
    assert isinstance(drafter, BlockDrafter)
    head, has_confidence = drafter.markov_head, drafter.confidence_head is not None
    return config | {
        "architectures": [f"{family}DSparkModel"],
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "markov_rank": head.rank if head is not None else 0,
        "enable_confidence_head": has_confidence,
        **({"markov_head_type": HEAD_NAMES[str(drafter.head_kind)]} if head is not None else {}),
        **({"confidence_head_with_markov": drafter.confidence_reads_markov} if has_confidence else {}),
    }


def _body_config(drafter: nn.Module, target: Target) -> dict[str, Any]:
    """The layer fields of a Transformers config: the target's own text config, or Qwen3's with the target's sizes."""
    facts = target.facts
    text = target.model.config.get_text_config(decoder=True)
    if facts.body == "gemma4":
        own = {key: value for key, value in text.to_dict().items() if key != "per_layer_config"}
        return own | {
            "model_type": "gemma4_text",
            "target_model_type": target.model.config.model_type,
            "target_text_model_type": text.model_type,
            "global_head_dim": facts.head_dim,
            "num_global_key_value_heads": facts.num_kv_heads,
            "attention_k_eq_v": facts.keys_are_values,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    if facts.family == "qwen3":
        return dict(text.to_dict())
    sizes = Qwen3Config(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        rms_norm_eps=facts.rms_norm_eps,
        max_position_embeddings=facts.max_position_embeddings,
        rope_parameters=dict(facts.rope_parameters),
    )
    return dict(sizes.to_dict())


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    names = ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type", "num_target_layers")
    return {name: config[name] for name in names} | {"sample_from_anchor": True}


def _own_tensors(drafter: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("backbone."): tensor for name, tensor in drafter.state_dict().items()}


def _shared_tensors(target: Target) -> dict[str, Tensor]:
    head = target.head
    return {"embed_tokens.weight": head.embedding.weight, "lm_head.weight": head.lm_head.weight}


def _name_or_path(target: Target) -> str:
    return str(target.model.config.name_or_path or target.facts.name)


def _vllm_command(method: str, gamma: int) -> str:
    settings = f'{{"method": "{method}", "model": "DIR", "num_speculative_tokens": {gamma}'
    sampled = ', "draft_sample_method": "probabilistic"' if method == "dspark" else ""
    return f"vllm serve TARGET --speculative-config '{settings}{sampled}}}'"


def rounded(layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors as they are written: the target's own in its dtype, so that they stay the target's.

    Copies, because tied embeddings share memory.
    """
    return {
        name: tensor.detach().to("cpu", tensor.dtype if name in SHARED else dtype, copy=True).contiguous()
        for name, tensor in layout.tensors.items()
    }
