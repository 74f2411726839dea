"""Packing of a training batch: conversations of different lengths share one dense row of tokens and blocks.

In: which positions and blocks of a padded batch matter. Out: indices from the padded batch to the dense row, and to
the grid that attention wants. Linear layers run over the dense row, so padding and dead blocks cost nothing there.
Shapes: N sequences, S tokens, A blocks a sequence, T context tokens and M blocks that matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NEARLY_ALL = 0.9  # share of context tokens from which all are kept


@dataclass(frozen=True)
class Index:
    """Dense rows of a padded batch: ``padded`` and ``grid`` are [count] indices into [N * width] and [N * used]."""

    padded: Tensor
    grid: Tensor
    num_sequences: int
    width: int
    used: int  # columns of the grid: the longest sequence after packing

    @staticmethod
    def of(keep_NW: Tensor) -> Index:
        """Kept columns move to the front of the grid, in order."""
        num_sequences, width = keep_NW.shape
        used = max(1, int(keep_NW.sum(1).max()))
        slot = keep_NW.cumsum(1) - 1 + torch.arange(num_sequences, device=keep_NW.device)[:, None] * used
        padded = keep_NW.flatten().nonzero().squeeze(-1)
        return Index(padded, slot.flatten()[padded], num_sequences, width, used)

    def pack(self, padded_NW: Tensor) -> Tensor:
        """[N, W, ...] -> [count, ...]."""
        flat = padded_NW.flatten(0, 1)
        return flat if len(self.padded) == len(flat) else flat[self.padded]

    def to_grid(self, packed: Tensor) -> Tensor:
        """[count, ...] -> [N, used, ...], zeros where a sequence is shorter."""
        return self._spread(packed, self.grid, self.used)

    def from_grid(self, grid_NU: Tensor) -> Tensor:
        """[N, used, ...] -> [count, ...]."""
        flat = grid_NU.flatten(0, 1)
        return flat if len(self.grid) == len(flat) else flat[self.grid]

    def unpack(self, packed: Tensor) -> Tensor:
        """[count, ...] -> [N, W, ...], zeros where nothing was kept."""
        return self._spread(packed, self.padded, self.width)

    def _spread(self, packed: Tensor, index: Tensor, columns: int) -> Tensor:
        shape = (self.num_sequences, columns, *packed.shape[1:])
        if len(packed) == self.num_sequences * columns:
            return packed.reshape(shape)
        return (
            packed.new_zeros(self.num_sequences * columns, *packed.shape[1:]).index_copy(0, index, packed).view(shape)
        )


@dataclass(frozen=True)
class Packing:
    """What the blocks of a batch need: context tokens before the last anchor of their sequence, and live blocks."""

    context: Index
    blocks: Index
    position_T: Tensor  # of each context token in its conversation
    anchor_M: Tensor  # position of each block's anchor
    anchor_grid: Tensor  # [N, used blocks]; 0 where there is none

    @staticmethod
    def of(anchors_NA: Tensor, live_NA: Tensor, num_tokens: int) -> Packing:
        """At least one block is kept, so that a rank with nothing live runs the same layers."""
        keep = live_NA.clone()
        keep[0, 0] |= ~keep.any()
        last_N = anchors_NA.masked_fill(~keep, 0).amax(1)
        columns = torch.arange(num_tokens, device=anchors_NA.device)
        needed = columns < last_N.clamp(min=1)[:, None]
        if int(needed.sum()) > _NEARLY_ALL * needed.numel():
            needed = torch.ones_like(needed)  # copying features would cost more than the few tokens
        context = Index.of(needed)
        blocks = Index.of(keep)
        anchor_M = blocks.pack(anchors_NA)
        return Packing(context, blocks, context.padded % num_tokens, anchor_M, blocks.to_grid(anchor_M))
