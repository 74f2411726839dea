"""A drafter spread over the ranks while it trains (FSDP2), for drafters that do not fit.

In: a drafter. Out: the same one, of whose weights, gradients and optimizer state each rank holds a part. A layer's
weights are gathered for its pass and freed after it; all of them, for drafting, which every rank does at its own pace,
into a copy that waits on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Sharded:
    """The sharded drafter and a whole one for drafting.

    Args:
        drafter: is sharded in place. mesh: the ranks, one dimension.
    """

    def __init__(self, drafter: Any, mesh: Any) -> None:
        self.drafter = drafter
        self._whole = copy.deepcopy(drafter, {id(drafter._frozen): drafter._frozen})  # the target's part by reference
        for layer in drafter.layers_alone():
            fully_shard(layer, mesh=mesh)
        fully_shard(drafter, mesh=mesh)

    @torch.no_grad()
    def whole(self) -> Any:
        """A drafter with the weights of now; all ranks ask together."""
        weights = {name: whole_tensor(value) for name, value in self.drafter.state_dict().items()}
        self._whole.load_state_dict(weights)
        return self._whole.to(next(iter(weights.values())).device)

    def release(self) -> None:
        """Drafting is over: the copy makes room."""
        self._whole.to("cpu")


def whole_tensor(value: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks; then all ranks ask together."""
    return cast(Tensor, value.full_tensor()) if isinstance(value, DTensor) else value
