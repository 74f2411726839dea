"""The frozen target behind one contract: features for training, flattened passes for decoding.

In: token ids. Out: outputs of the tapped layers and the state the LM head eats. Never hands out logits by itself.
Knows nothing about drafters, losses or sampling rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from dspark_exp.contracts import FrozenHead, TargetFacts
from dspark_exp.errors import ConfigError, TargetError
from dspark_exp.targets import ragged
from dspark_exp.targets.layers import resolve_layer_ids

FAMILIES = ("qwen3", "llama")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ragged.register()


class Target:
    """A frozen causal language model with everything that drafting needs to know about it."""

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, revision: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.facts, self.revision = tokenizer, facts, revision
        self._captured: dict[int, Tensor] = {}
        for layer_id in facts.layer_ids:
            module = self._body.embed_tokens if layer_id == -1 else self._body.layers[layer_id]
            module.register_forward_hook(self._capture(layer_id))

    @property
    def _body(self) -> Any:
        return self.model.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> FrozenHead:
        """Embedding and LM head, by reference."""
        return FrozenHead(self.model.get_input_embeddings(), self.model.get_output_embeddings())

    def to(self, device: torch.device | str) -> Target:
        self.model.to(device)
        return self

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Right-padded [N, S] ids -> taps [N, S, m*d] and final [N, S, d]. Padded rows hold no meaning."""
        final = self._body(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self._taken(), final

    @torch.no_grad()
    def forward_ragged(self, tokens_B: Tensor, plan: ragged.RaggedPass) -> tuple[Tensor, Tensor]:
        """B flattened tokens of several requests -> taps [B, m*d] and final [B, d]; keys go to the plan's cache."""
        final = self._body(
            tokens_B[None],
            attention_mask=torch.empty(1, 1, 1, 1, device=tokens_B.device),  # 4-d: Transformers builds no mask
            position_ids=plan.position_B[None],
            use_cache=False,
            ragged_pass=plan,
        ).last_hidden_state
        return self._taken()[0], final[0]

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """LM head in float32 outcome; rows past the tokenizer's ids are -inf, so they are never drawn."""
        logits = self.model.get_output_embeddings()(final).float()
        logits[..., self.facts.num_usable_tokens :] = float("-inf")
        return logits

    def new_cache(self, num_rows: int, max_length: int) -> ragged.RaggedKVCache:
        facts = self.facts
        return ragged.RaggedKVCache(
            facts.num_layers, num_rows, facts.num_kv_heads, max_length, facts.head_dim, self.dtype, self.device
        )

    def fingerprint(self) -> dict[str, Any]:
        """What a stored feature or response depends on: weights, tokenizer, template, taps."""
        template = self.tokenizer.chat_template or ""
        return {
            "target": self.facts.name,
            "revision": self.revision,
            "layer_ids": list(self.facts.layer_ids),
            "dtype": str(self.dtype).removeprefix("torch."),
            "template_sha256": _sha(template),
            "tokenizer_sha256": _sha(json.dumps(sorted(self.tokenizer.get_vocab().items()))),
        }

    def _capture(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def _taken(self) -> Tensor:
        taps = torch.cat([self._captured[layer_id] for layer_id in self.facts.layer_ids], dim=-1)
        self._captured.clear()
        return taps


def load_target(
    name: str,
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    layer_ids: Sequence[int] | None = None,
    num_feature_layers: int = 5,
    mask_token_id: int | None = None,
) -> Target:
    """Load a target by ``embedded``, folder or hub id.

    Raises:
        TargetError: the folder or hub id cannot be read, or the family is not supported.
        ConfigError: unknown dtype, layer ids out of range, mask id out of range.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"target.dtype={dtype!r} is unknown; choose from {', '.join(_DTYPES)}.")
    hf_logging.disable_progress_bar()
    location = str(files("dspark_exp").joinpath("assets/tiny_target")) if path == "embedded" else path
    config = read_target_config(location)
    if config.model_type not in FAMILIES:
        raise TargetError(
            f"Target family {config.model_type!r} is not supported yet; supported are {', '.join(FAMILIES)}."
        )
    ids = resolve_layer_ids(layer_ids, config.num_hidden_layers, num_feature_layers)
    tokenizer = AutoTokenizer.from_pretrained(location)
    if tokenizer.chat_template is None:
        raise TargetError(f"The tokenizer of {location} has no chat template; add one (tokenizer.chat_template).")
    model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=_DTYPES[dtype], attn_implementation=ragged.RAGGED)
    facts = _facts(name, model, tokenizer, ids, mask_token_id)
    return Target(model.to(device=device), tokenizer, facts, _revision(Path(location), model))


def read_target_config(location: str) -> Any:
    """The Transformers config of a folder or hub id.

    Raises:
        TargetError: nothing readable there.
    """
    try:
        return AutoConfig.from_pretrained(location)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"No target model at {location!r}: give a folder with config.json or a hub id that this machine can reach "
            f"(target.path=…). {str(error).splitlines()[0]}"
        ) from error


def _facts(name: str, model: Any, tokenizer: Any, layer_ids: tuple[int, ...], mask_token_id: int | None) -> TargetFacts:
    config = model.config
    rows = model.get_input_embeddings().weight.shape[0]
    mask = mask_token_id if mask_token_id is not None else tokenizer.mask_token_id
    if mask is None:
        mask = _unused_token_id(tokenizer, rows)
    stop_ids = _stop_ids(model, tokenizer)
    if not 0 <= mask < rows or mask in stop_ids:
        raise ConfigError(
            f"target.mask_token_id={mask} must be one of the {rows} embedding rows and no stop token {list(stop_ids)}."
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    return TargetFacts(
        name=name,
        family=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=rows,
        num_usable_tokens=min(len(tokenizer), rows),
        layer_ids=layer_ids,
        mask_token_id=int(mask),
        pad_token_id=int(pad),
        stop_ids=stop_ids,
    )


def _unused_token_id(tokenizer: Any, rows: int) -> int:
    """A row the text never uses: one past the tokenizer where the embedding is padded, else a reserved special."""
    if len(tokenizer) < rows:
        return len(tokenizer)
    busy = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    spare = [i for i in tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder) if i not in busy]
    if not spare:
        raise ConfigError("This tokenizer has no unused token for the mask; give one with target.mask_token_id=<id>.")
    return max(spare)


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Union of the tokenizer's, the generation config's and the model config's end tokens."""
    found: set[int] = set()
    for source in (tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.eos_token_id):
        found.update([source] if isinstance(source, int) else source or [])
    if not found:
        raise TargetError("The target declares no end token in its tokenizer, generation config or config.")
    return tuple(sorted(found))


def _revision(location: Path, model: Any) -> str:
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    digest = hashlib.sha256()
    for path in sorted(location.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
