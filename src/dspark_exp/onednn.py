"""Matrix products on a CPU through oneDNN: PyTorch's float32 kernels take slow code paths on some processors.

A forward over few tokens is bound by how weights are read, and the default kernels lay a weight out anew in every call.
Packed once, verifying eight tokens can cost less than one token did. Wide products outside of autograd, those of the
chunked losses, gain from the kernels alone.
In: tensors, modules with linear layers. Out: products; the same modules, parameters untouched. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# below, the call costs more than the layout saves
_FEWEST_WEIGHTS = {torch.float32: 1 << 17, torch.bfloat16: 1 << 16}
_TOKENS = 16  # the number of rows that the layout is chosen for; others work as well


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T``, [M, V], of rows [M, d] and weight [V, d], outside of autograd; ``weight`` may be a view."""
    if not (rows.dtype == weight.dtype == torch.float32 and _gains(weight)):
        return rows @ weight.T
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")


class PackedLinear(nn.Linear):
    """A linear layer that keeps a packed copy of its weight for passes without gradient.

    The copy is made when first needed and again after the weight has changed. Passes that need gradients, another dtype
    or another device take the usual way.
    """

    _packed: _Packed

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        usable = weight.device.type == "cpu" and input.dtype == weight.dtype in _FEWEST_WEIGHTS and input.numel() > 0
        if torch.is_grad_enabled() or not usable or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed.of(weight), self.bias, "none", [], "")


class _Packed:
    """The packed copy of one weight; copies of a layer start without one."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._source = torch.empty(0)  # held, so that no other weight can come to lie at its address
        self._version = 0

    def of(self, weight: Tensor) -> Tensor:
        same = self._source.data_ptr() == weight.data_ptr() and self._version == weight._version
        if self._copy is None or not same:
            self._source, self._version = weight.detach(), weight._version
            self._copy = torch.ops.mkldnn._reorder_linear_weight(self._source, _TOKENS)
        return self._copy

    def __deepcopy__(self, _memo: Any) -> _Packed:
        return _Packed()

    def __reduce__(self) -> tuple[type[_Packed], tuple[()]]:
        return _Packed, ()


def pack_linears(*modules: nn.Module, max_bytes: float = float("inf")) -> int:
    """Turn the linear layers of modules on a CPU into packed ones; returns how many bytes their copies will take.

    Nothing is done, and 0 returned, where oneDNN is missing and where the copies would take more than ``max_bytes``.
    """
    layers = {
        layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and _gains(layer.weight)
    }
    size = sum(layer.weight.nbytes for layer in layers)
    if size > max_bytes:
        return 0
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = PackedLinear  # in place: whoever holds this layer holds the packed one
            layer.__dict__["_packed"] = _Packed()
    return size


def _gains(weight: Tensor) -> bool:
    """Whether products with this weight are worth oneDNN's kernels, and can have them."""
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not on_cpu or weight.numel() < _FEWEST_WEIGHTS.get(weight.dtype, float("inf")):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
