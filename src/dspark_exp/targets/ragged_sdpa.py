"""Scaled-dot-product attention over ragged rows: runs of requests of like size, each one padded call.

Padding all requests of a pass to its longest would let one long prompt set the price of every other; a call for each
would let the calls do so. The runs are chosen to be cheapest, so a pass costs about what its own tokens and keys cost.
In: rows, positions and visibility of one flattened pass. Out: attention per token. Equal to ``ragged_flex``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# A call, in keys of one row that could be read meanwhile. CPU: 30 us at 12 GB/s, measured with SmolLM2's heads;
# elsewhere estimated from 10 us at 2 TB/s.
_CPU_CALL_COST, _CALL_COST = 250.0, 16_384.0
_PLAN_COST = 3  # of planning a run, once a pass, in calls
_QUERY_COST = 1 / 6  # of one more query against a key, in units of reading that key


@dataclass(frozen=True)
class Run:
    """Requests whose queries go through one call: [requests, queries of the longest] over the keys of their rows."""

    tokens: slice  # of the flattened pass
    rows: slice | Tensor  # a slice where rows follow one another: their keys are then a view, nothing is gathered
    places_B: Tensor | None  # of each query among requests x longest; None where all have as many
    position_RQ: Tensor
    visible_RQ: Tensor  # how many positions of its row a query sees
    width: int  # the most of them
    sees_all: bool  # every query sees as many
    is_causal: bool  # prompts from their start: what a query sees needs no mask, and its kernel skips the rest
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask_of(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores [R, 1, groups * Q, K] in a layer that looks back ``window`` tokens, itself included.

        The heads that share a key head are queries of one attention, so the mask stands once for each of them.
        None where every query sees every key.
        """
        key = (window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._mask(window, groups, dtype)
        return self._masks[key]

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        if window is None and self.sees_all:
            return None
        keys = torch.arange(self.width, device=self.visible_RQ.device)
        sees = keys < self.visible_RQ[..., None]
        if window is not None:
            sees &= keys > self.position_RQ[..., None] - window
        added = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, float("-inf"))
        return added.repeat(1, groups, 1)[:, None]

    def attend(
        self, query_BHD: Tensor, stored_keys: Tensor, stored_values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The run's queries [b, H, D] against the rows of a cache [rows, K, L, D]; returns [b, H, D]."""
        if window is not None and window >= self.width:
            window = None
        shape = *self.position_RQ.shape, *query_BHD.shape[1:]
        keys, values = (part[:, :, : self.width][self.rows] for part in (stored_keys, stored_values))
        groups = shape[2] // keys.shape[1]
        query = query_BHD
        if self.places_B is not None:
            query = query_BHD.new_zeros(shape[0] * shape[1], *shape[2:]).index_copy_(0, self.places_B, query_BHD)
        grid = query.to(keys.dtype).reshape(*shape[:2], keys.shape[1], groups, shape[3])
        if self.is_causal and window is None:
            out = scaled_dot_product_attention(
                grid.flatten(2, 3).transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1
            ).transpose(1, 2)
        else:
            folded = grid.permute(0, 2, 3, 1, 4).flatten(2, 3)
            mask = self.mask_of(window, groups, keys.dtype)
            out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
            out = out.unflatten(2, (groups, shape[1])).permute(0, 3, 1, 2, 4)
        out = out.reshape(-1, *shape[2:])
        return out if self.places_B is None else out[self.places_B]


def attend(
    runs: Sequence[Run],
    query_BHD: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """[B, H, D] queries of a pass, run by run; returns [B, H, D]."""
    parts = [run.attend(query_BHD[run.tokens], stored_keys, stored_values, scale, window) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_runs(
    rows: list[int],
    counts: list[int],
    position_B: Tensor,
    visible_B: Tensor,
    num_layers: int,
    device: torch.device,
) -> list[Run]:
    """Cut a pass into runs.

    Args:
        rows, counts: row of each request, and how many queries it has, at least one.
        position_B, visible_B: [B] on the host: position of each query, and how many positions of its row it sees.
        num_layers: attention layers that will use the runs.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    widths = np.maximum.reduceat(visible_B.numpy(), ends - np.asarray(counts))
    cost = _CPU_CALL_COST if device.type == "cpu" else _CALL_COST
    cuts = cheapest_cuts(np.asarray(counts), widths, cost * (1 + _PLAN_COST / num_layers))
    runs = []
    for first, last in pairwise(cuts):
        tokens = slice(int(ends[first] - counts[first]), int(ends[last - 1]))
        part = position_B[tokens], visible_B[tokens]
        runs.append(_run(tokens, rows[first:last], counts[first:last], *part, int(widths[first:last].max()), device))
    return runs


def cheapest_cuts(counts: np.ndarray, widths: np.ndarray, call_cost: float) -> list[int]:
    """Where to cut n requests in a row so that all calls together are cheapest: 0, ..., n. O(n^2), exact.

    A call over requests i .. j-1 costs ``call_cost + (j - i) * max(widths) * (1 + max(counts) / 6)``.
    """
    number = len(counts)
    best, previous = np.zeros(number + 1), np.zeros(number + 1, dtype=np.int64)
    most, widest = np.zeros(number), np.zeros(number)
    for end in range(1, number + 1):
        np.maximum(most[:end], counts[end - 1], out=most[:end])
        np.maximum(widest[:end], widths[end - 1], out=widest[:end])
        requests = end - np.arange(end)
        total = best[:end] + call_cost + requests * widest[:end] * (1 + _QUERY_COST * most[:end])
        previous[end] = np.argmin(total)
        best[end] = total[previous[end]]
    cuts = [number]
    while cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    return cuts[::-1]


def _run(
    tokens: slice,
    rows: list[int],
    counts: list[int],
    position: Tensor,
    visible: Tensor,
    width: int,
    device: torch.device,
) -> Run:
    number, count = len(rows), max(counts)
    slots = np.concatenate([np.arange(c) for c in counts])
    is_causal = bool((position.numpy() == slots).all() and (visible.numpy() == slots + 1).all())
    places = None
    if min(counts) < count:
        places = torch.from_numpy(slots + count * np.repeat(np.arange(number), counts))
        padded = torch.tensor([[0], [1]]).repeat(1, number * count)
        padded[:, places] = torch.stack([position, visible])
        position, visible = padded  # of a padded query: at position 0, sees one key; its output is dropped
    follow = rows == list(range(rows[0], rows[0] + number))
    return Run(
        tokens=tokens,
        rows=slice(rows[0], rows[0] + number) if follow else torch.tensor(rows, device=device),
        places_B=None if places is None else places.to(device),
        position_RQ=position.view(number, count).to(device),
        visible_RQ=visible.view(number, count).to(device),
        width=width,
        sees_all=int(visible.numpy().min()) == width,
        is_causal=is_causal and count > 1,
    )
