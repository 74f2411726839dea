"""The frozen target behind one contract: features for training, flattened passes for decoding.

In: token ids. Out: outputs of the tapped layers and the state the LM head eats. Never hands out logits by itself.
Knows nothing about drafters, losses or sampling rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as hf_logging

from dspark_exp.contracts import FrozenHead, TargetFacts
from dspark_exp.errors import ConfigError, TargetError
from dspark_exp.hashing import file_digest, short_digest
from dspark_exp.targets import ragged
from dspark_exp.targets.families import read_architecture, text_body
from dspark_exp.targets.layers import resolve_layer_ids
from dspark_exp.targets.pace import Pace
from dspark_exp.targets.vocabulary import VocabSpec, read_vocabulary, stop_ids_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ragged.register()


class Target:
    """A frozen causal language model with everything that drafting needs to know about it.

    Attributes:
        attention: the backend of the caches it decodes with, see ``RaggedKVCache``.
        pace: keeps the passes of ranks in step where the target is spread over them (``targets.sharded``).
    """

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, revision: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.facts, self.revision = tokenizer, facts, revision
        self.attention = "auto"
        self.pace: Pace | None = None
        self._captured: dict[int, Tensor] = {}
        tapped = {i: self.body.embed_tokens if i == -1 else self.body.layers[i] for i in facts.layer_ids}
        self._hooks = [module.register_forward_hook(self._capture(i)) for i, module in tapped.items()]

    @property
    def body(self) -> Any:
        """The decoder layers between embedding and LM head, the final norm included."""
        return text_body(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> FrozenHead:
        """Embedding and LM head, by reference."""
        facts = self.facts
        return FrozenHead(
            self.model.get_input_embeddings(),
            self.model.get_output_embeddings(),
            facts.num_usable_tokens if facts.num_usable_tokens < facts.vocab_size else None,
            facts.logit_softcap,
        )

    def to(self, device: torch.device | str) -> Target:
        self.model.to(device)
        return self

    def release(self) -> None:
        """Leave the model to another ``Target``."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Padded [N, S] ids -> taps [N, S, m*d] and final [N, S, d]. Padded positions hold no meaning."""
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        final = self._pass(input_ids, attention_mask=attention_mask, position_ids=positions)
        return self._taken(), final

    @torch.no_grad()
    def forward_ragged(self, tokens_B: Tensor, plan: ragged.RaggedPass) -> tuple[Tensor, Tensor]:
        """B flattened tokens of several requests -> taps [B, m*d] and final [B, d]; keys go to the plan's cache."""
        final = self._pass(
            tokens_B[None],
            attention_mask=torch.empty(1, 1, 1, 1, device=tokens_B.device),  # 4-d: Transformers builds no mask
            position_ids=plan.position_B[None],
            ragged_pass=plan,
        )
        return self._taken()[0], final[0]

    @torch.no_grad()
    def catch_up(self) -> None:
        """Take part in the passes of other ranks until none has any left; before ranks meet. Needed where sharded."""
        while self.pace is not None and self.pace.others_go_on():
            self.body(torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        self._captured.clear()

    def _pass(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        if self.pace is not None:
            self.pace.announce()
        hidden: Tensor = self.body(input_ids, use_cache=False, **inputs).last_hidden_state
        return hidden

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """What the target samples from, soft cap included; rows past the tokenizer's ids are -inf."""
        return self.head.logits(final)

    def new_cache(self, num_rows: int, max_length: int) -> ragged.RaggedKVCache:
        """Rows for ``forward_ragged``."""
        facts = self.facts
        return ragged.RaggedKVCache(facts.layer_kv, num_rows, max_length, self.dtype, self.device, self.attention)

    def fingerprint(self) -> dict[str, Any]:
        """What a stored feature or response depends on: weights, tokenizer, template, taps."""
        vocabulary = self.tokenizer.get_vocab() if self.tokenizer is not None else {}
        return {
            "target": self.facts.name,
            "revision": self.revision,
            "layer_ids": list(self.facts.layer_ids),
            "dtype": str(self.dtype).removeprefix("torch."),
            "template_sha256": short_digest(getattr(self.tokenizer, "chat_template", None) or ""),
            "tokenizer_sha256": short_digest(vocabulary),
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
    location = location_of(path)
    config = read_target_config(location)
    num_layers = read_architecture(config).num_layers
    ids = resolve_layer_ids(layer_ids, num_layers, num_feature_layers)
    tokenizer = _tokenizer(location)
    model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=_DTYPES[dtype], attn_implementation=ragged.RAGGED)
    vocabulary = read_vocabulary(model, tokenizer, mask_token_id)
    revision = _revision(Path(location), model)
    return target_of(name, model.to(device=device), tokenizer, layer_ids=ids, vocabulary=vocabulary, revision=revision)


def location_of(path: str) -> str:
    """The folder of the embedded target, or the folder or hub id that was given."""
    return str(files("dspark_exp").joinpath("assets/tiny_target")) if path == "embedded" else path


def read_tokenizer(path: str) -> tuple[Any, tuple[int, ...]]:
    """Tokenizer and end tokens of a target whose weights are not needed.

    Raises:
        TargetError: nothing readable there, or no chat template.
    """
    location = location_of(path)
    config, tokenizer = read_target_config(location), _tokenizer(location)
    try:
        generation = GenerationConfig.from_pretrained(location)
    except OSError:
        generation = None  # many checkpoints have none
    return tokenizer, stop_ids_of(tokenizer, config, generation)


def _tokenizer(location: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(location)
    if tokenizer.chat_template is None:
        raise TargetError(f"The tokenizer of {location} has no chat template; add one (tokenizer.chat_template).")
    return tokenizer


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


def target_of(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    layer_ids: tuple[int, ...],
    vocabulary: VocabSpec,
    revision: str,
) -> Target:
    """A loaded model as a target.

    Raises:
        TargetError: the family or this variant of it is not supported.
    """
    facts = TargetFacts(
        **vars(read_architecture(model.config)),
        name=name,
        vocab_size=vocabulary.embedding_rows,
        num_usable_tokens=vocabulary.num_usable,
        layer_ids=layer_ids,
        mask_token_id=vocabulary.mask_id,
        pad_token_id=vocabulary.pad_id,
        stop_ids=vocabulary.stop_ids,
    )
    return Target(model, tokenizer, facts, revision)


def _revision(location: Path, model: Any) -> str:
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    return file_digest(*sorted(location.glob("*.safetensors")))[:16]
