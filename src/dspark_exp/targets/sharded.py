"""A target spread over the ranks of a job: every rank holds a part of each layer and has the whole of one at a time.

In: a loaded target, the same on every rank. Out: that target, its decoder layers under FSDP2. Weights cross ranks;
activations and logits do not. Embedding, final norm and LM head, which drafters share, stay whole on every rank.
Ranks that gather weights must make their passes together, whatever each has to do: see ``Pace``.
"""

from __future__ import annotations

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dspark_exp.targets.adapter import Target
from dspark_exp.targets.pace import Pace


def shard_over_ranks(target: Target, mesh: distributed.DeviceMesh) -> Target:
    """Spread the decoder layers of a target that lies on the CPU, and move it to the mesh's device.

    All ranks call it, one after another or together, with the mesh of ``rank_mesh``.
    """
    body = target.body
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    in_layers = {id(parameter) for layer in body.layers for parameter in layer.parameters()}
    whole = {parameter for parameter in body.parameters() if id(parameter) not in in_layers}
    fully_shard(body, mesh=mesh, ignored_params=whole)  # their root: it starts gathering the next layer early
    target.to(mesh.device_type)
    target.pace = Pace()
    return target


def rank_mesh(device: str) -> distributed.DeviceMesh:
    """All ranks in one row; they meet here."""
    return init_device_mesh(device, (distributed.get_world_size(),))
