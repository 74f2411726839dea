"""FlexAttention over ragged rows: the kernel for GPUs, where a pass of B tokens should cost B and not rows x longest.

In: the index plan of one flattened pass. Out: a block mask that visits, for each tile of queries, the key tiles of
the rows in it and no others. Equal to the padded attention of ``ragged``; which of them runs is the cache's choice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dspark_exp.flex import flex_kernel

TILE = 128  # queries and keys of one tile; rows of the cache start at a multiple of it


def tile_mask(
    rows: np.ndarray, visible: np.ndarray, position: Tensor, row_length: int, window: int | None
) -> BlockMask:
    """The tiles that B queries need, and the rule inside a tile.

    Args:
        rows, visible: [B] on the host, row of each query and how many positions of it may be seen.
        position: [B] on the device, position of each query (only a window asks for it).
        row_length: positions of a row in the cache, a multiple of ``TILE``.
        window: keys this many positions behind a query, or more, are not seen.
    """
    device, num_queries = position.device, len(rows)
    num_tiles, per_row = -(-num_queries // TILE), row_length // TILE
    columns: list[list[int]] = []
    for tile in range(num_tiles):
        part = slice(tile * TILE, (tile + 1) * TILE)
        longest = {int(row): int(visible[part][rows[part] == row].max()) for row in np.unique(rows[part])}
        columns.append([row * per_row + k for row, seen in longest.items() for k in range(-(-seen // TILE))])
    num_rows = int(rows.max()) + 1
    width = num_rows * per_row  # BlockMask wants a column for every key tile
    counts = torch.tensor([len(c) for c in columns], dtype=torch.int32)
    indices = torch.tensor([c + [0] * (width - len(c)) for c in columns], dtype=torch.int32)
    row_B, visible_B = torch.from_numpy(rows).to(device), torch.from_numpy(visible).to(device)

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = k % row_length
        seen = (k // row_length == row_B[q]) & (inside < visible_B[q])
        return seen if window is None else seen & (inside > position[q] - window)

    return BlockMask.from_kv_blocks(
        counts[None, None].to(device),
        indices[None, None].to(device),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_queries, row_length * num_rows),
    )


def attend(query_BHD: Tensor, keys_KRLD: Tensor, values_KRLD: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """[B, H, D] queries against all rows of the cache, heads before rows; returns [B, H, D]."""
    num_rows = mask.seq_lengths[1] // keys_KRLD.shape[2]
    keys, values = (part[:, :num_rows].flatten(1, 2)[None] for part in (keys_KRLD, values_KRLD))
    query = query_BHD.to(keys.dtype).transpose(0, 1)[None]
    grouped = query.shape[1] != keys.shape[1]
    out = flex_kernel(query.is_cuda)(query, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
