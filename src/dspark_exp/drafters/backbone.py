"""The parallel backbone (DFlash): one forward over a block, target features injected as keys and values.

In: tapped target features and the block's embeddings. Out: one hidden state per slot.
Knows nothing about sequential heads, losses or sampling. Equations 2 and 3 of the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from dspark_exp.contracts import KVPass
from dspark_exp.drafters.attention import attend_blocks, block_mask, resolve_backend
from dspark_exp.drafters.geometry import DraftLayer, Geometry, RMSNorm
from dspark_exp.drafters.packing import Packing


class ParallelBackbone(nn.Module):
    """``fc`` projects the taps (Eq. 2); every layer's keys and values are projections of [context ; block] (Eq. 3).

    ``checkpoint``: keep each layer's input alone and compute the layer again in the backward pass.
    ``window``: a slot sees keys less than this many positions behind it; null = all.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_layers: int,
        attention: str = "auto",
        checkpoint: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.checkpoint, self.window = attention, checkpoint, window
        self.fc = nn.Linear(geometry.num_taps * geometry.hidden_size, geometry.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(geometry, geometry.hidden_size) for _ in range(num_layers))
        self.norm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.rotary = geometry.rotary()

    def _blocks(self) -> Iterator[DraftLayer]:
        return iter(cast(Iterable[DraftLayer], self.layers))

    def context(self, taps: Tensor) -> Tensor:
        """[..., m*d] -> [..., d]: H_ctx, shared by all layers."""
        return self.hidden_norm(self.fc(taps))

    def forward(self, taps_TE: Tensor, block_MGd: Tensor, packing: Packing) -> Tensor:
        """All blocks of a packed training batch at once; slot k of the anchor at t has RoPE position t+k-1.

        Returns:
            Hidden states [M, G, d] after the final norm.
        """
        block_size = block_MGd.shape[1]
        backend = resolve_backend(self.attention, taps_TE.device)
        mask = block_mask(packing.anchor_grid, packing.context.used, block_size, backend, self.window)
        context = self.context(taps_TE)
        slots = packing.anchor_M[:, None] + _arange(block_size, packing.anchor_M)
        rotation_context, rotation_block = self.rotary(packing.position_T), self.rotary(slots)

        def run(layer: DraftLayer, hidden: Tensor, context: Tensor) -> Tensor:
            normed = layer.input_layernorm(hidden)
            context_key, context_value = layer.self_attn.key_value(context, rotation_context)
            block_key, block_value = layer.self_attn.key_value(normed, rotation_block)
            attended = attend_blocks(
                packing.blocks.to_grid(layer.self_attn.query(normed, rotation_block)),
                packing.context.to_grid(context_key),
                packing.context.to_grid(context_value),
                packing.blocks.to_grid(block_key),
                packing.blocks.to_grid(block_value),
                packing.anchor_grid,
                layer.self_attn.scale,
                backend,
                mask,
                self.window,
            )
            return layer.finish(hidden, packing.blocks.from_grid(attended))

        hidden = block_MGd
        for layer in self._blocks():
            hidden = layer(run, hidden, context, checkpointed=self.checkpoint and torch.is_grad_enabled())
        return self.norm(hidden)

    def extend(self, taps_BE: Tensor, plan: KVPass) -> None:
        """Write the keys and values of B new context tokens."""
        context = self.context(taps_BE)
        rotation = self.rotary(plan.position_B)
        for index, layer in enumerate(self._blocks()):
            plan.write(index, *layer.self_attn.key_value(context, rotation))

    def decode(self, block_Bd: Tensor, plan: KVPass) -> Tensor:
        """Hidden states [B, d] of the flattened blocks of a batch of requests."""
        rotation = self.rotary(plan.position_B)
        hidden = block_Bd
        for index, layer in enumerate(self._blocks()):
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.key_value(normed, rotation)
            query = layer.self_attn.query(normed, rotation)
            attended = plan.attend(index, query, keys, values, layer.self_attn.scale, self.window)
            hidden = layer.finish(hidden, attended.to(hidden.dtype))
        return self.norm(hidden)


def _arange(count: int, like: Tensor) -> Tensor:
    return like.new_ones(count).cumsum(0) - 1
