"""Losses of drafted slots evaluated over the vocabulary in chunks of positions, with a custom backward.

In: hidden states, bias features, the target's final states, labels, weights. Out: weighted sums and, per slot, the
analytic acceptance 1 - L1/2. Logits are never kept: peak memory grows with the chunk, not with slots x vocabulary.
Knows nothing about drafters, anchors or normalisation.

Shapes: M live slots, U distinct context positions, V vocabulary, d hidden, r bias rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark_exp.contracts import autocast_dtype
from dspark_exp.onednn import product

CHUNK_ELEMENTS = 1 << 23  # logits held at a time, in the dtype of the matrix products: large enough for their speed
_TILE_ELEMENTS = 1 << 19  # logits widened to float32 at a time: small enough for the processor's cache


@dataclass(frozen=True)
class SlotLosses:
    """Per-slot values, all detached but ``total``. ``accept`` = 1 - L1/2 (Eq. 8)."""

    total: Tensor  # [] differentiable: sum_m weight_m * (ce*CE + l1*L1 + soft_ce*SoftCE)
    ce: Tensor  # [M]
    l1: Tensor  # [M]
    soft_ce: Tensor  # [M]; zero where its coefficient is
    accept: Tensor  # [M]


def slot_losses(
    hidden_Md: Tensor,
    lm_head_Vd: Tensor,
    bias_features_Mr: Tensor | None,
    bias_weight_Vr: Tensor | None,
    final_Ud: Tensor,
    position_M: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    *,
    ce: float,
    l1: float,
    soft_ce: float = 0.0,
    softcap: float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> SlotLosses:
    """Cross-entropy (Eq. 9), total variation x 2 (Eq. 10) and soft cross-entropy of M slots.

    Args:
        hidden_Md: drafter states; draft logits are ``hidden @ lm_head^T + bias_features @ bias_weight^T``.
        lm_head_Vd: the target's LM head, frozen: it gets no gradient.
        softcap: ``hidden @ lm_head^T`` becomes softcap * tanh(. / softcap), in drafter and target, before the bias.
        final_Ud: target states after the final norm at U distinct positions; target logits are computed once for each.
        position_M: index into ``final_Ud`` of each slot, sorted ascending.
        labels_M: token of each slot; weights_M: weight of each slot (denominators included).
        ce, l1, soft_ce: coefficients of the three terms in ``total``.
        chunk_elements: logits held at a time.
    """
    coefficients = (float(ce), float(l1), float(soft_ce))
    total, *terms = _SlotLosses.apply(
        hidden_Md,
        lm_head_Vd,
        bias_features_Mr,
        bias_weight_Vr,
        final_Ud,
        position_M,
        labels_M,
        weights_M,
        coefficients,
        softcap,
        chunk_elements,
    )
    return SlotLosses(total, *terms)


class _SlotLosses(torch.autograd.Function):
    """The gradient is written in the forward pass, while each chunk's probabilities are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        bias_features: Tensor | None,
        bias_weight: Tensor | None,
        final: Tensor,
        position: Tensor,
        labels: Tensor,
        weights: Tensor,
        coefficients: tuple[float, float, float],
        softcap: float | None,
        chunk_elements: int,
    ) -> tuple[Tensor, ...]:
        dtype = autocast_dtype(hidden.device, hidden.dtype)
        head = lm_head.to(dtype)
        bias_head = None if bias_weight is None else bias_weight.to(dtype)
        needs_grad = any(ctx.needs_input_grad[:4])
        grads = _Gradients(hidden, bias_features, bias_weight) if needs_grad else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        terms = hidden.new_zeros(4, hidden.shape[0], dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            for slots, context in _chunks(position, final.shape[0], lm_head.shape[0], chunk_elements):
                target, _ = _capped(product(final[context].to(dtype), head), softcap, needs_slope=False)
                logits, slope = _capped(product(hidden[slots].to(dtype), head), softcap, needs_slope=needs_grad)
                z = None if bias_features is None else bias_features[slots].to(dtype)
                if z is not None and bias_head is not None:
                    logits.addmm_(z, bias_head.T)
                local = position[slots] - context.start
                # logits become their own gradient, tile by tile
                _tiles(logits, target, local, labels[slots], weights[slots], coefficients, terms[:, slots], needs_grad)
                if grads is not None:
                    grads.add(slots, logits, slope, head, z, bias_head)
        if grads is not None:
            ctx.save_for_backward(*grads.saved())
        ctx.has_bias = bias_features is not None
        ce, l1, soft_ce, accept = terms
        total = (weights.to(wide) * (coefficients[0] * ce + coefficients[1] * l1 + coefficients[2] * soft_ce)).sum()
        ctx.mark_non_differentiable(ce, l1, soft_ce, accept)
        return total, ce, l1, soft_ce, accept

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        # a factor of one is the common case, and the bias weight's gradient is large; on a GPU asking would wait for it
        if grad_total.is_cuda or float(grad_total) != 1.0:
            gradients = tuple(grad * grad_total.to(grad.dtype) for grad in gradients)
        grad_hidden, *rest = gradients
        grad_features, grad_weight = rest if ctx.has_bias else (None, None)
        return grad_hidden, None, grad_features, grad_weight, *(None,) * 7


class _Gradients:
    """Accumulators for hidden states, bias features and the bias weight."""

    def __init__(self, hidden: Tensor, bias_features: Tensor | None, bias_weight: Tensor | None) -> None:
        self.hidden = torch.zeros_like(hidden)
        self.features = None if bias_features is None else torch.zeros_like(bias_features)
        self.weight = None
        if bias_weight is not None:
            self.weight = torch.zeros_like(bias_weight, dtype=torch.promote_types(bias_weight.dtype, torch.float32))
            self._weight_dtype = bias_weight.dtype

    def add(
        self,
        slots: slice,
        grad: Tensor,
        slope: Tensor | None,
        head: Tensor,
        features: Tensor | None,
        bias_head: Tensor | None,
    ) -> None:
        before_cap = grad if slope is None else grad * slope
        self.hidden[slots] = product(before_cap, head.T).to(self.hidden.dtype)
        if self.features is not None and self.weight is not None and features is not None and bias_head is not None:
            self.features[slots] = product(grad, bias_head.T).to(self.features.dtype)
            if grad.dtype == self.weight.dtype:
                self.weight.addmm_(grad.T, features)
            else:
                self.weight += grad.T @ features

    def saved(self) -> list[Tensor]:
        weight = None if self.weight is None else self.weight.to(self._weight_dtype)
        return [tensor for tensor in (self.hidden, self.features, weight) if tensor is not None]


def _capped(logits: Tensor, softcap: float | None, needs_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Soft-capped logits and the cap's derivative there, 1 - tanh^2."""
    if softcap is None:
        return logits, None
    ratio = torch.tanh(_wide(logits) / softcap)
    slope = (1 - ratio.square()).to(logits.dtype) if needs_slope else None
    return (softcap * ratio).to(logits.dtype), slope


def _wide(logits: Tensor) -> Tensor:
    """Softmaxes run in float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _tiles(
    logits: Tensor,
    target: Tensor,
    position: Tensor,
    labels: Tensor,
    weights: Tensor,
    coefficients: tuple[float, float, float],
    terms: Tensor,
    needs_grad: bool,
) -> None:
    """Fill the terms of a chunk; with ``needs_grad`` overwrite ``logits`` [m, V] with d total / d logits."""
    rows = max(1, (_TILE_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS) // logits.shape[1])
    for first in range(0, len(logits), rows):
        tile = slice(first, first + rows)
        p = _wide(target[position[tile]]).softmax(-1)
        grad = _tile_terms(_wide(logits[tile]), p, labels[tile], coefficients, terms[:, tile], needs_grad)
        if grad is not None:
            logits[tile] = grad.mul_(weights[tile, None])


def _tile_terms(
    logits: Tensor,
    p: Tensor,
    labels: Tensor,
    coefficients: tuple[float, float, float],
    terms: Tensor,
    needs_grad: bool,
) -> Tensor | None:
    """The four terms of a tile and their gradient; ``p`` is the target's distribution."""
    ce, l1, soft_ce = coefficients
    log_q = logits.log_softmax(-1)
    terms[0] = -log_q.gather(-1, labels[:, None]).squeeze(-1)
    if soft_ce:
        terms[2] = -torch.linalg.vecdot(p, log_q)
    q = log_q.exp_()
    difference = q - p
    distance = torch.linalg.vector_norm(difference, ord=1, dim=-1)
    terms[1] = distance
    terms[3] = (1 - distance / 2).clamp(0, 1)
    if not needs_grad:
        return None
    # d CE = q - onehot;  d SoftCE = q - p;  d L1 = q * (s - <q, s>) with s = sign(q - p)
    soft = difference * soft_ce if soft_ce else None
    if l1:
        sign = difference.sign_()
        offset = ce - l1 * torch.linalg.vecdot(q, sign)
        grad = sign.mul_(l1).add_(offset[:, None]).mul_(q)
    else:
        grad = q.mul_(ce)
    if soft is not None:
        grad = grad.add_(soft)
    if ce:
        grad.scatter_add_(-1, labels[:, None], grad.new_full((len(labels), 1), -ce))
    return grad


def _chunks(position: Tensor, num_positions: int, vocab: int, chunk_elements: int) -> list[tuple[slice, slice]]:
    """Equal chunks, split at context positions, so that no position's target logits are computed twice."""
    num_slots = torch.bincount(position, minlength=num_positions).tolist()
    most = max(1, chunk_elements // vocab)
    num_chunks = max(1, -(-len(position) // most))
    budget = max(1, -(-len(position) // num_chunks))
    chunks, slot, context = [], 0, 0
    while context < num_positions:
        end_context, end_slot = context, slot
        while end_context < num_positions and (end_context == context or end_slot - slot < budget):
            if end_context > context and end_slot + num_slots[end_context] - slot > budget:
                break
            end_slot += num_slots[end_context]
            end_context += 1
        chunks.append((slice(slot, end_slot), slice(context, end_context)))
        slot, context = end_slot, end_context
    return chunks
