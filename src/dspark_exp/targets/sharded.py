"""A target spread over the ranks of a job: every rank holds a part of each layer and has the whole of one at a time.

In: a loaded target, the same on every rank. Out: that target, its decoder layers under FSDP2. Weights cross ranks;
activations and logits do not. Embedding, final norm and LM head, which drafters share, stay whole on every rank.
Ranks that gather weights must make their passes together, whatever each has to do: see ``Pace``.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dspark_exp.targets.adapter import Target


class Pace:
    """Keeps the passes of all ranks in step. A rank announces each of its own; one without work asks for the others'.

    Every announcement is one sum over ranks, of a number on the host, before the pass.
    """

    def announce(self) -> None:
        """Before a pass of this rank's own."""
        self._num_working(1)

    def others_go_on(self) -> bool:
        """Whether another rank has a pass now, which this one must take part in."""
        return self._num_working(0) > 0

    def _num_working(self, own: int) -> int:
        count = torch.tensor(own)
        distributed.all_reduce(count)
        return int(count)


def shard_over_ranks(target: Target, device: str) -> Target:
    """Spread the decoder layers of a target that lies on the CPU, and move it to the device.

    All ranks call it, one after another or together; the mesh of ranks must be there (``rank_mesh``).
    """
    body = target.body
    mesh = rank_mesh(device)
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    in_layers = {id(parameter) for layer in body.layers for parameter in layer.parameters()}
    whole = {parameter for parameter in body.parameters() if id(parameter) not in in_layers}
    fully_shard(body, mesh=mesh, ignored_params=whole)  # their root: it starts gathering the next layer early
    target.to(device)
    target.pace = Pace()
    return target


def rank_mesh(device: str) -> distributed.DeviceMesh:
    """All ranks in one row. The first call meets the others."""
    return init_device_mesh(device, (distributed.get_world_size(),))
