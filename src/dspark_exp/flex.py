"""FlexAttention: compiled once and shared where there is a GPU, plain elsewhere. Knows no model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention


def flex_kernel(is_cuda: bool) -> Any:
    """The kernel for tensors of this device: ``flex_attention``, compiled for a GPU."""
    return _compiled() if is_cuda else flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
