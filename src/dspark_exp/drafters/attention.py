"""Attention of drafted blocks during training: context before the anchor, and the own block both ways.

In: queries and keys of A blocks of G slots beside S context keys. Out: attention output per slot.
Three backends of equal output behind one switch. A block never sees another block, nor its anchor's own feature.

Shapes: N sequences, S context tokens, A anchors, G slots, H heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dspark_exp.errors import ConfigError
from dspark_exp.flex import flex_kernel

BACKENDS = ("auto", "eager", "sdpa", "flex")


def resolve_backend(backend: str, device: torch.device) -> str:
    """``auto`` is flex on CUDA and eager elsewhere.

    Raises:
        ConfigError: unknown backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"drafter.network.attention={backend!r} is unknown; choose from {', '.join(BACKENDS)}.")
    if backend != "auto":
        return backend
    return "flex" if device.type == "cuda" else "eager"


def attend_blocks(
    query_NAGHD: Tensor,
    context_key_NSKD: Tensor,
    context_value_NSKD: Tensor,
    block_key_NAGKD: Tensor,
    block_value_NAGKD: Tensor,
    anchors_NA: Tensor,
    scale: float,
    backend: str,
    mask: Tensor | BlockMask | None = None,
    window: int | None = None,
) -> Tensor:
    """Slots attend to context positions < anchor and to their own block. Returns [N, A, G, H, D].

    ``window``: keys this many positions behind a slot, or more, are not seen.
    """
    if backend == "eager":
        return _eager(
            query_NAGHD,
            context_key_NSKD,
            context_value_NSKD,
            block_key_NAGKD,
            block_value_NAGKD,
            anchors_NA,
            scale,
            window,
        )
    num_heads = query_NAGHD.shape[3]
    shape = query_NAGHD.shape
    query = query_NAGHD.flatten(1, 2).transpose(1, 2)
    key = torch.cat([context_key_NSKD, block_key_NAGKD.flatten(1, 2)], dim=1).transpose(1, 2)
    value = torch.cat([context_value_NSKD, block_value_NAGKD.flatten(1, 2)], dim=1).transpose(1, 2)
    grouped = num_heads != key.shape[1]
    if mask is None:
        mask = block_mask(anchors_NA, context_key_NSKD.shape[1], shape[2], backend, window)
    if backend == "sdpa":
        assert isinstance(mask, Tensor)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    else:
        out = flex_kernel(query.is_cuda)(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(shape)


def block_mask(
    anchors_NA: Tensor, context_length: int, block_size: int, backend: str, window: int | None = None
) -> Tensor | BlockMask | None:
    """The visibility rule in the form a backend wants; shared by all layers of one step."""
    num_sequences, num_anchors = anchors_NA.shape
    queries, keys = num_anchors * block_size, context_length + num_anchors * block_size
    if backend == "eager":
        return None

    def sees(n: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = q // block_size
        in_context = (k < context_length) & (k < anchors_NA[n, block])
        in_block = (k >= context_length) & ((k - context_length) // block_size == block)
        if window is not None:
            in_context = in_context & (k > anchors_NA[n, block] + q % block_size - window)
            in_block = in_block & ((k - context_length) % block_size > q % block_size - window)
        return in_context | in_block

    device = anchors_NA.device
    if backend == "flex":
        return create_block_mask(sees, num_sequences, None, queries, keys, device=device)
    n = torch.arange(num_sequences, device=device).view(-1, 1, 1, 1)
    q = torch.arange(queries, device=device).view(1, 1, -1, 1)
    k = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return sees(n, n, q, k)


def _eager(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    anchors: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Context and own block in one softmax over S + G keys: no mask over other blocks is ever built."""
    n, a, g, h, d = query.shape
    s, k = context_key.shape[1:3]
    grouped = query.view(n, a, g, k, h // k, d)
    # keys shared by the heads of a group: fold group and slots into one query axis per kv head
    flat = grouped.permute(0, 3, 1, 4, 2, 5).reshape(n, k, a * (h // k) * g, d)
    on_context = (flat @ context_key.permute(0, 2, 3, 1)) * scale
    hidden = torch.arange(s, device=query.device)[None, None] >= anchors[:, :, None]
    on_context = on_context.view(n, k, a, (h // k) * g, s).masked_fill(hidden[:, None, :, None], float("-inf"))
    local = flat.view(n, k, a, (h // k) * g, d)
    on_block = (local @ block_key.permute(0, 3, 1, 4, 2)) * scale
    if window is not None:
        slot = torch.arange(g, device=query.device).repeat(h // k)
        first = anchors[..., None] + slot - window  # the last position that is too far behind
        behind = torch.arange(s, device=query.device) <= first[..., None]
        on_context = on_context.masked_fill(behind[:, None], float("-inf"))
        on_block = on_block.masked_fill(slot[:g] <= slot[:, None] - window, float("-inf"))
    weights = torch.cat([on_context, on_block], dim=-1).float().softmax(-1).to(query.dtype)
    from_context = weights[..., :s].reshape(n, k, -1, s) @ context_value.permute(0, 2, 1, 3)
    from_block = weights[..., s:] @ block_value.permute(0, 3, 1, 2, 4)
    out = from_context.view(n, k, a, h // k, g, d) + from_block.view(n, k, a, h // k, g, d)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(n, a, g, h, d)
