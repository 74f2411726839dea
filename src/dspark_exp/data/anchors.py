"""Anchors: where drafted blocks start in a training sequence, and which of their slots are live.

In: token ids and supervision. Out: AnchorBlocks. Knows nothing about drafters.
Shapes: N sequences, S tokens, A anchors, G block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_exp.contracts import AnchorBlocks


def draw_anchors(
    input_ids: Tensor, supervised: Tensor, num_anchors: int, block_size: int, generator: torch.Generator
) -> AnchorBlocks:
    """Draw up to ``num_anchors`` anchors per sequence, without replacement; rows with fewer have dead blocks.

    Position t may be an anchor if t and t+1 are both supervised. Slot k predicts token t+k and is live while
    t+1..t+k are all inside the sequence and supervised (DESIGN section 4).
    """
    allowed = torch.zeros_like(supervised)
    allowed[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    noise = torch.rand(allowed.shape, generator=generator).to(allowed.device)
    order = noise.masked_fill(~allowed, -1.0).argsort(dim=1, descending=True)[:, :num_anchors]
    keep = allowed.gather(1, order)
    return blocks_at(input_ids, supervised, order.masked_fill(~keep, 0), keep, block_size)


def blocks_at(
    input_ids: Tensor, supervised: Tensor, positions_NA: Tensor, keep_NA: Tensor, block_size: int
) -> AnchorBlocks:
    """Blocks at given anchor positions; ``keep`` false makes a block dead."""
    length = input_ids.shape[1]
    slots = positions_NA[..., None] + torch.arange(1, block_size + 1, device=input_ids.device)
    inside = slots < length
    clamped = slots.clamp(max=length - 1)
    labels = _take(input_ids, clamped)
    previous = _take(input_ids, (slots - 1).clamp(max=length - 1))
    live = (_take(supervised, clamped) & inside & keep_NA[..., None]).cumprod(-1).bool()
    return AnchorBlocks(positions_NA, labels, previous, live)


def _take(values_NS: Tensor, index_NAG: Tensor) -> Tensor:
    return values_NS.gather(1, index_NAG.flatten(1)).view(index_NAG.shape)
