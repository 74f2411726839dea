"""Key/value rows of requests that advance by different amounts, and attention over one flattened pass.

In: B flattened query tokens, each with its row and position. Out: attention output per token.
The cost of a pass depends on B, not on rows x block. Knows nothing about models, sampling or drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dspark_exp.errors import ConfigError, DataError
from dspark_exp.targets import ragged_flex, ragged_sdpa

RAGGED = "dspark_ragged"
BACKENDS = ("auto", "sdpa", "flex")


class RaggedKVCache:
    """One preallocated [rows, kv heads, length, head width] block per layer; rows keep their own lengths.

    Args:
        layer_kv: key/value heads and head width of every layer of the model that writes here.
        num_rows: requests in flight at most.
        max_length: positions per row, the transient ones of a block included.
        backend: attention: ``sdpa`` over runs of rows padded to the longest of the run, or ``flex`` over tiles of the
            flattened pass. ``auto`` is sdpa.

    Raises:
        ConfigError: unknown backend.
    """

    def __init__(
        self,
        layer_kv: Sequence[tuple[int, int]],
        num_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"evaluation.attention={backend!r} is unknown; choose from {', '.join(BACKENDS)}.")
        self.backend = "sdpa" if backend == "auto" else backend
        self.row_length = max_length
        if self.backend == "flex":
            self.row_length = -(-max_length // ragged_flex.TILE) * ragged_flex.TILE
        # heads lie before rows, so that all rows of a head are one run of keys
        shapes = [(heads, num_rows, self.row_length, width) for heads, width in layer_kv]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device).transpose(0, 1) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device).transpose(0, 1) for shape in shapes]
        self.num_rows, self.max_length, self.device = num_rows, max_length, device

    def causal_pass(self, rows: list[int], starts: list[int], counts: list[int]) -> RaggedPass:
        """Tokens start .. start+count-1 of each row; a query sees its row's positions up to its own."""
        row, position = _flatten(rows, starts, counts)
        return self._pass(rows, counts, row, position, position + 1)

    def block_pass(self, rows: list[int], starts: list[int], count: int) -> RaggedPass:
        """``count`` tokens per row that see each other, both ways, and everything before ``start``."""
        counts = [count] * len(rows)
        row, position = _flatten(rows, starts, counts)
        visible = torch.tensor(starts).repeat_interleave(count) + count
        return self._pass(rows, counts, row, position, visible)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row onto another one."""
        for block in (*self.keys, *self.values):
            block[destination, :, :length] = block[source, :, :length]

    def _pass(self, rows: list[int], counts: list[int], row: Tensor, position: Tensor, visible: Tensor) -> RaggedPass:
        seen = visible.numpy()
        if (width := int(seen.max())) > self.max_length:
            raise DataError(f"A request needs {width} positions; the cache holds {self.max_length}.")
        return RaggedPass(
            cache=self,
            row_B=row.to(self.device),
            position_B=position.to(self.device),
            seen_by_B=(row.numpy(), seen),
            make_runs=lambda: ragged_sdpa.make_runs(rows, counts, position, visible, len(self.keys), self.device),
        )


@dataclass(frozen=True)
class RaggedPass:
    """The index plan of one flattened forward; built once per pass, used by every layer.

    What attention alone needs is built when it is first asked for: a drafter that takes in features only writes.
    """

    cache: RaggedKVCache
    row_B: Tensor
    position_B: Tensor
    seen_by_B: tuple[np.ndarray, np.ndarray]  # on the host: row of each query, and how much of it is visible
    make_runs: Callable[[], list[ragged_sdpa.Run]]
    _tiles: dict[int | None, BlockMask] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[ragged_sdpa.Run]:
        """The calls of the sdpa backend."""
        return self.make_runs()

    def tiles_of(self, window: int | None) -> BlockMask:
        """The key tiles of every query tile, for the flex backend."""
        if window not in self._tiles:
            self._tiles[window] = ragged_flex.tile_mask(*self.seen_by_B, self.position_B, self.cache.row_length, window)
        return self._tiles[window]

    def write(self, layer: int, key_BHD: Tensor, value_BHD: Tensor) -> None:
        """Store keys and values at (row, position)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.row_B, :, self.position_B] = key_BHD.to(keys.dtype)
        values[self.row_B, :, self.position_B] = value_BHD.to(values.dtype)

    def attend(
        self,
        layer: int,
        query_BHD: Tensor,
        key_BHD: Tensor,
        value_BHD: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store keys and values, attend each query to what it may see; returns [B, H, D]."""
        self.write(layer, key_BHD, value_BHD)
        if self.cache.backend == "flex":
            stored = self.cache.keys[layer].transpose(0, 1), self.cache.values[layer].transpose(0, 1)
            return ragged_flex.attend(query_BHD, *stored, self.tiles_of(window), scale)
        return ragged_sdpa.attend(self.runs, query_BHD, self.cache.keys[layer], self.cache.values[layer], scale, window)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged_pass: RaggedPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers attention function: flattened [1, H, B, D] when a pass is given, plain SDPA otherwise."""
    if ragged_pass is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = ragged_pass.attend(
        layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), float(scale), sliding_window
    )
    return out[None].to(query.dtype), None


def register() -> None:
    """Make the name ``dspark_ragged`` known to Transformers, for every model family."""
    AttentionInterface.register(RAGGED, ragged_attention)
    AttentionMaskInterface.register(RAGGED, sdpa_mask)


def _flatten(rows: list[int], starts: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    row = torch.tensor(rows).repeat_interleave(torch.tensor(counts))
    position = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    return row, position
