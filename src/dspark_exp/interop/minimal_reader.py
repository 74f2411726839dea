"""An independent reader of exported drafters: one block, written out plainly from config.json and tensors alone.

In: a folder, the target's plain Transformers hidden states, context tokens. Out: greedy draft tokens, their logits and
confidences. It shares no code with the drafters or the writer, so that an export which reads back right is right; it
follows the fields that an engine would follow, the layer-id convention of each included. Slow and simple on purpose.

Shapes: S context tokens, G draft tokens, V vocabulary, d hidden, H heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4TextConfig, Qwen3Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_exp.errors import CheckpointError
from dspark_exp.interop.checkpoint_files import read_json, read_tensors


@dataclass(frozen=True)
class Draft:
    """One greedy block. ``confidence``: logits of conditional acceptance, or None without a confidence head."""

    tokens: list[int]
    logits: Tensor  # [G, V]
    confidence: Tensor | None  # [G]


class MinimalReader:
    """A drafter as an engine would see it.

    Args:
        folder: the export.
        embedding, lm_head: the target's, used where the file holds none of its own.

    Raises:
        CheckpointError: a field or tensor that an engine needs is not there.
    """

    def __init__(self, folder: Path, embedding: Tensor, lm_head: Tensor) -> None:
        self.config = config = read_json(folder / "config.json")
        self.weights = {name: tensor.float() for name, tensor in read_tensors(folder).items()}
        layer: dict[str, Any] = config.get("transformer_layer_config", config)
        self.embedding = self.weights.get("embed_tokens.weight", embedding.float())
        self.lm_head = self.weights.get("lm_head.weight", lm_head.float())
        self.is_gemma = layer.get("model_type") == "gemma4_text"
        self.heads, self.eps = int(layer["num_attention_heads"]), float(layer["rms_norm_eps"])
        self.kv_heads, self.width = int(layer["num_key_value_heads"]), int(layer["head_dim"])
        self.cap, self.num_layers = layer.get("final_logit_softcapping"), int(layer["num_hidden_layers"])
        self.rope: Any
        if self.is_gemma:
            self.width = int(layer["global_head_dim"])
            self.kv_heads = int(layer["num_global_key_value_heads"])
            self.rope = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**_clean(layer)))
        else:
            self.rope = Qwen3RotaryEmbedding(Qwen3Config(**_clean(layer)))

    @torch.no_grad()
    def draft(self, hidden_states: Sequence[Tensor], ids: Sequence[int]) -> Draft:
        """Draft after ``ids``, whose last one is the anchor.

        Args:
            hidden_states: the target's states [S, d] of the tokens before the anchor; entry 0 is the embedding's
                output, entry i+1 decoder layer i's.
        """
        try:
            taps = torch.cat([hidden_states[index].float() for index in self._state_indices()], dim=-1)
            if "Eagle3" in self.config["architectures"][0]:
                return self._eagle3(taps, list(ids))
            return self._block(taps, ids[-1])
        except KeyError as error:
            raise CheckpointError(f"The export lacks {error}.") from error

    def _state_indices(self) -> list[int]:
        """Indices into hidden states, by the convention of the field that is there."""
        config = self.config
        for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
            if name in config:
                return list(config[name])
        nested = config.get("dflash_config") or config
        return [index + 1 for index in nested["target_layer_ids"]]

    def _block(self, taps: Tensor, anchor_id: int) -> Draft:
        """DSpark: context keys and values beside the block's own, then the Markov head token by token."""
        config, count = self.config, int(self.config["block_size"])
        mask_id = int((config.get("dflash_config") or config)["mask_token_id"])
        context = self._norm(taps @ self.weights["fc.weight"].T, "hidden_norm.weight")
        hidden = self._embed([anchor_id] + [mask_id] * (count - 1))
        length = len(context)
        for index in range(self.num_layers):
            prefix = f"layers.{index}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            rope = self._rotation(length + count)
            key, value = self._key_value(torch.cat([context, normed]), prefix, rope)
            query = self._query(normed, prefix, [part[length:] for part in rope])
            hidden = self._finish(hidden, self._attend(query, key, value, None), prefix)
        hidden = self._norm(hidden, "norm.weight")
        logits, tokens, confidence = self._logits(hidden), [], []
        state, previous = torch.zeros(int(config["markov_rank"])), anchor_id
        for slot in range(count):
            if config["markov_rank"] > 0:
                features, state, embedded = self._markov(previous, hidden[slot], state)
                logits[slot] += features @ self.weights["markov_head.markov_w2.weight"].T
            if config.get("enable_confidence_head"):
                with_markov = config.get("confidence_head_with_markov", True)
                parts = torch.cat([hidden[slot], embedded]) if with_markov else hidden[slot]
                weight, bias = self.weights["confidence_head.proj.weight"], self.weights["confidence_head.proj.bias"]
                confidence.append((parts @ weight.T + bias)[0])
            previous = int(logits[slot].argmax())
            tokens.append(previous)
        return Draft(tokens, logits, torch.stack(confidence) if confidence else None)

    def _markov(self, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded = self.weights["markov_head.markov_w1.weight"][previous]
        kind = self.config["markov_head_type"]
        if kind == "gated":
            joined = torch.cat([hidden, embedded])
            weight, bias = self.weights["markov_head.gate_proj.weight"], self.weights["markov_head.gate_proj.bias"]
            return torch.sigmoid(weight @ joined + bias) * embedded, state, embedded
        if kind == "rnn":
            joined = torch.cat([state, embedded, hidden])
            weight, bias = self.weights["markov_head.joint_proj.weight"], self.weights["markov_head.joint_proj.bias"]
            gate, candidate, output = (weight @ joined + bias).chunk(3)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate), embedded
        return embedded, state, embedded

    def _eagle3(self, taps: Tensor, ids: list[int]) -> Draft:
        """Position i pairs the target's state at i with token i+1; drafted steps go on from the last hidden state."""
        config = self.config
        count = int(
            config.get("ttt_length") or config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        )
        hidden, tokens, all_logits = taps @ self.weights["fc.weight"].T, ids[1:], []
        drafted: list[int] = []
        prefix = "layers.0."
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(count):
            embedded = self._norm(self._embed(tokens), prefix + "input_layernorm.weight")
            mixed = torch.cat([embedded, self._norm(hidden, prefix + "hidden_norm.weight")], dim=-1)
            start = sum(len(key) for key in keys)
            rope = [part[start:] for part in self._rotation(start + len(tokens))]
            key, value = self._key_value(mixed, prefix, rope)
            keys.append(key)
            values.append(value)
            visible = torch.ones(len(tokens), start + len(tokens)).tril(start).bool()
            attended = self._attend(self._query(mixed, prefix, rope), torch.cat(keys), torch.cat(values), visible)
            hidden = self._finish(hidden, attended, prefix)[-1:]
            all_logits.append(self._logits(self._norm(hidden, "norm.weight"))[0])
            tokens = [int(all_logits[-1].argmax())]
            drafted += tokens
        return Draft(drafted, torch.stack(all_logits), None)

    # plain transformer parts

    def _embed(self, ids: Sequence[int]) -> Tensor:
        scale = self.embedding.shape[1] ** 0.5 if self.is_gemma else 1.0
        return self.embedding[torch.tensor(list(ids))] * scale

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.lm_head.T
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _rotation(self, length: int) -> list[Tensor]:
        positions = torch.arange(length)[None]
        arguments = (positions, "full_attention") if self.is_gemma else (positions,)
        return [part[0, :, None] for part in self.rope(torch.zeros(1), *arguments)]

    def _query(self, x: Tensor, prefix: str, rope: Sequence[Tensor]) -> Tensor:
        query = (x @ self.weights[prefix + "self_attn.q_proj.weight"].T).view(len(x), self.heads, self.width)
        return _rotated(self._norm(query, prefix + "self_attn.q_norm.weight"), rope)

    def _key_value(self, x: Tensor, prefix: str, rope: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        shape = (len(x), self.kv_heads, self.width)
        key = (x @ self.weights[prefix + "self_attn.k_proj.weight"].T).view(shape)
        value = key
        if prefix + "self_attn.v_proj.weight" in self.weights or not self.is_gemma:
            value = (x @ self.weights[prefix + "self_attn.v_proj.weight"].T).view(shape)
        if self.is_gemma:
            value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.eps)
        return _rotated(self._norm(key, prefix + "self_attn.k_norm.weight"), rope), value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        groups = self.heads // self.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (1.0 if self.is_gemma else self.width**-0.5)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)

    def _finish(self, hidden: Tensor, attended: Tensor, prefix: str) -> Tensor:
        attended = attended @ self.weights[prefix + "self_attn.o_proj.weight"].T
        if not self.is_gemma:
            hidden = hidden + attended
            return hidden + self._mlp(self._norm(hidden, prefix + "post_attention_layernorm.weight"), prefix)
        hidden = hidden + self._norm(attended, prefix + "post_attention_layernorm.weight")
        fed = self._mlp(self._norm(hidden, prefix + "pre_feedforward_layernorm.weight"), prefix)
        hidden = hidden + self._norm(fed, prefix + "post_feedforward_layernorm.weight")
        return hidden * self.weights[prefix + "layer_scalar"]

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate = x @ self.weights[prefix + "mlp.gate_proj.weight"].T
        gate = torch.nn.functional.gelu(gate, approximate="tanh") if self.is_gemma else torch.nn.functional.silu(gate)
        up = x @ self.weights[prefix + "mlp.up_proj.weight"].T
        return (gate * up) @ self.weights[prefix + "mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name]


def _rotated(x: Tensor, rope: Sequence[Tensor]) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _clean(layer: dict[str, Any]) -> dict[str, Any]:
    """Fields that a Transformers config takes back; ``dtype`` and class names are not its business."""
    return {key: value for key, value in layer.items() if key not in ("architectures", "dtype", "transformers_version")}
