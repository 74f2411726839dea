"""Sizes of a drafter, checked once, and the small layers that all drafters share.

Knows nothing about targets beyond their facts. Tensor names follow the released checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_exp.contracts import TargetFacts
from dspark_exp.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    """Widths of the drafter's layers. Hidden width and vocabulary are the target's: embedding and head are shared."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    num_taps: int
    rope_parameters: dict[str, object]
    max_position_embeddings: int
    body: str = "qwen3"
    keys_are_values: bool = False

    @staticmethod
    def of(facts: TargetFacts, intermediate_size: int | None = None) -> Geometry:
        """The target's own widths; ``intermediate_size`` may be narrowed."""
        return Geometry(
            hidden_size=facts.hidden_size,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            intermediate_size=intermediate_size or facts.intermediate_size,
            rms_norm_eps=facts.rms_norm_eps,
            vocab_size=facts.vocab_size,
            num_taps=len(facts.layer_ids),
            rope_parameters=dict(facts.rope_parameters),
            max_position_embeddings=facts.max_position_embeddings,
            body=facts.body,
            keys_are_values=facts.keys_are_values,
        )

    def rotary(self) -> Rotary:
        return Rotary(self)


class Rotary(nn.Module):
    """Rotary embedding of the target's own kind, frequencies in float32 whatever the weights' dtype."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        config = Qwen3Config(
            hidden_size=geometry.hidden_size,
            num_attention_heads=geometry.num_heads,
            head_dim=geometry.head_dim,
            max_position_embeddings=geometry.max_position_embeddings,
            rope_parameters=dict(geometry.rope_parameters),
        )
        self._embedding = (Qwen3RotaryEmbedding(config),)  # in a tuple: its buffers follow no dtype cast

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [..., L] -> cos, sin [..., L, 1, head_dim], ready for [..., L, H, head_dim]."""
        embedding = self._embedding[0].to(positions.device)
        flat = positions.reshape(1, -1)
        cos, sin = embedding(torch.empty(0, dtype=torch.float32, device=positions.device), flat)
        shape = (*positions.shape, 1, cos.shape[-1])
        return cos.view(shape), sin.view(shape)


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding to [..., L, H, D]."""
    cos, sin = rotation
    left, right = states.chunk(2, dim=-1)
    return (states * cos + torch.cat([-right, left], dim=-1) * sin).to(states.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm that computes in float32 and returns the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + (self.eps or 0.0))).to(x.dtype)


class GatedMLP(nn.Module):
    """Gated feed-forward layer: SiLU (Qwen3 style) or tanh-approximated GELU (Gemma style)."""

    def __init__(self, hidden_size: int, intermediate_size: int, gelu: bool = False) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = nn.functional.gelu(gate, approximate="tanh") if self.gelu else nn.functional.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Projections(nn.Module):
    """Query, key, value and output projections with per-head norms, heads split.

    Gemma 4 style: scores are not scaled, values pass a norm without weight, and where ``keys_are_values`` the values
    are the key projection before its norm.
    """

    def __init__(self, geometry: Geometry, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.is_gemma4, self.keys_are_values = geometry.body == "gemma4", geometry.keys_are_values
        self.scale = 1.0 if self.is_gemma4 else self.head_dim**-0.5
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        if not self.keys_are_values:
            self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, geometry.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=geometry.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=geometry.rms_norm_eps)

    def query(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[..., L, input] -> rotated queries [..., L, H, D]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))), rotation)

    def key_value(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., L, input] -> rotated keys and values [..., L, Hkv, D]."""
        heads = (self.num_kv_heads, self.head_dim)
        projected = self.k_proj(x).unflatten(-1, heads)
        values = projected if self.keys_are_values else self.v_proj(x).unflatten(-1, heads)
        if self.is_gemma4:
            values = nn.functional.rms_norm(values.float(), (self.head_dim,), eps=self.k_norm.eps).to(values.dtype)
        return rotate(self.k_norm(projected), rotation), values


class DraftLayer(nn.Module):
    """Attention and a feed-forward layer, pre-normed; in Gemma 4 style each result is normed again and scaled.

    The caller runs the attention itself, between ``self_attn`` and ``finish``. In training it does so through the
    layer's call, ``layer(run, ...)``: what wraps modules, such as FSDP, sees where a layer's pass begins and ends.
    """

    def __init__(self, geometry: Geometry, input_size: int) -> None:
        super().__init__()
        width, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.is_gemma4 = geometry.body == "gemma4"
        self.self_attn = Projections(geometry, input_size)
        self.mlp = GatedMLP(width, geometry.intermediate_size, gelu=self.is_gemma4)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        if self.is_gemma4:
            self.pre_feedforward_layernorm = RMSNorm(width, eps=eps)
            self.post_feedforward_layernorm = RMSNorm(width, eps=eps)
            self.register_buffer("layer_scalar", torch.ones(1))  # part of the released layout; never trained

    def forward(self, run: Callable[..., Tensor], *inputs: Tensor, checkpointed: bool = False) -> Tensor:
        """``run(self, *inputs)``; checkpointed: its activations are computed again in the backward pass."""
        if checkpointed:
            again: Tensor = checkpoint(run, self, *inputs, use_reentrant=False, preserve_rng_state=False)
            return again
        return run(self, *inputs)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual stream [..., d] after this layer, from the attention's output [..., H, D]."""
        projected = self.self_attn.o_proj(attended.flatten(-2))
        if not self.is_gemma4:
            hidden = residual + projected
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = residual + self.post_attention_layernorm(projected)
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Normal weights, zero biases, unit norms, as Transformers initialises a model."""
    for child in module.modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            nn.init.normal_(child.weight, std=std)
            if getattr(child, "bias", None) is not None:
                nn.init.zeros_(child.bias)  # type: ignore[arg-type]


def check_positive(**settings: int) -> None:
    """Every setting must be an integer above zero.

    Raises:
        ConfigError: naming the setting and what was given.
    """
    for name, value in settings.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"drafter.network.{name}={value!r}: expected an integer of at least 1.")


def in_dtype(drafter: Any, dtype: torch.dtype) -> Any:
    """A copy of a drafter, target's embedding and head included, for decoding in ``dtype``.

    A drafter's precision never touches exactness: what is verified against is the distribution it really sampled from.
    Where nothing would change the drafter itself is returned.
    """
    frozen = drafter.frozen
    if frozen.lm_head.weight.dtype != dtype:
        embedding, lm_head = (copy.deepcopy(part).to(dtype) for part in (frozen.embedding, frozen.lm_head))
        frozen = replace(frozen, embedding=embedding, lm_head=lm_head)
    if frozen is drafter.frozen and all(p.dtype == dtype for p in drafter.parameters()):
        return drafter
    # the memo puts the new head where the old one was, so that no copy of the old one is made
    return copy.deepcopy(drafter, {id(drafter._frozen): (frozen,)}).to(dtype)
