"""A target cut across the ranks of a job: each has a part of every layer's heads and of its intermediate width.

In: a loaded target, the same on every rank. Out: a target that any rank asks for passes of its own requests; all ranks
compute each pass, and sums of hidden states cross ranks, never logits. Embedding, norms and LM head, which drafters
share, stay whole. Which projections are cut, and how, is what Transformers declares for the family.
"""

from __future__ import annotations

import itertools
import re
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dspark_exp.errors import ConfigError, TargetError
from dspark_exp.targets.adapter import Target
from dspark_exp.targets.ragged import RaggedKVCache

_WHOLE = ("replicated_with_grad_allreduce",)  # small parameters of a head's width: every rank has them


@dataclass(frozen=True)
class _Ragged:
    """A flattened pass that one rank asks of all.

    Attributes:
        shape: of its token ids.
        cache, num_rows, max_length: its rows lie in the owner's cache of that number and size.
        copies: (source, destination, length) of rows to copy before.
        dropped: caches that the owner has let go.
    """

    shape: tuple[int, ...]
    cache: int
    num_rows: int
    max_length: int
    rows: list[int]
    starts: list[int]
    counts: list[int]
    copies: list[tuple[int, int, int]]
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Padded:
    """A padded pass; ``shape``: of ids and mask, stacked."""

    shape: tuple[int, ...]


class RemoteCache:
    """Rows whose keys and values lie in parts on all ranks; this rank's ``RaggedKVCache``."""

    def __init__(self, number: int, num_rows: int, max_length: int, dropped: list[int]) -> None:
        self.number, self.num_rows, self.max_length = number, num_rows, max_length
        self.copies: list[tuple[int, int, int]] = []
        weakref.finalize(self, dropped.append, number)

    def causal_pass(self, rows: list[int], starts: list[int], counts: list[int]) -> _Ragged:
        """What ``forward_ragged`` of this target takes: see ``RaggedKVCache.causal_pass``."""
        copies, self.copies = self.copies, []
        return _Ragged((sum(counts),), self.number, self.num_rows, self.max_length, rows, starts, counts, copies)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row onto another one, before the next pass."""
        self.copies.append((source, destination, length))


class TensorParallelTarget(Target):
    """A target whose layers are cut over the ranks. Passes of a rank are the work of all: see ``catch_up``.

    Raises:
        ConfigError: heads or widths cannot be cut into so many equal parts.
        TargetError: Transformers declares no such cut for the family.
    """

    def __init__(self, whole: Target) -> None:
        whole.release()
        super().__init__(whole.model, whole.tokenizer, whole.facts, whole.revision)
        self._rank, parts = distributed.get_rank(), distributed.get_world_size()
        cut_layers(self.body, [heads for heads, _ in self.facts.layer_kv], self._rank, parts)
        self._layer_kv = [(heads // parts, width) for heads, width in self.facts.layer_kv]
        self._caches: dict[tuple[int, int], RaggedKVCache] = {}  # by owner and number
        self._numbers, self._dropped = itertools.count(), list[int]()

    def new_cache(self, num_rows: int, max_length: int) -> Any:
        return RemoteCache(next(self._numbers), num_rows, max_length, self._dropped)

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([input_ids, attention_mask.to(input_ids.dtype)])
        return self._with_all(_Padded(tuple(both.shape)), both)[self._rank]

    @torch.no_grad()
    def forward_ragged(self, tokens_B: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        dropped, self._dropped[:] = tuple(self._dropped), []
        return self._with_all(replace(plan, dropped=dropped), tokens_B)[self._rank]

    @torch.no_grad()
    def catch_up(self) -> None:
        """Compute this rank's part of the others' passes until none has any left; before ranks meet."""
        while self._with_all(None, None):
            pass

    def _with_all(self, own: _Ragged | _Padded | None, ids: Tensor | None) -> dict[int, tuple[Tensor, Tensor]]:
        """One pass of every rank that has one, in the order of ranks: what came of each."""
        asked: list[_Ragged | _Padded | None] = [None] * distributed.get_world_size()
        distributed.all_gather_object(asked, own)
        found = {}
        for owner, work in enumerate(asked):
            if work is None:
                continue
            if owner == self._rank and ids is not None:
                theirs = ids.contiguous()
            else:
                theirs = torch.empty(work.shape, dtype=torch.long, device=self.device)
            distributed.broadcast(theirs, owner)
            found[owner] = self._pass_of(owner, work, theirs)
        return found

    def _pass_of(self, owner: int, work: _Ragged | _Padded, ids: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(work, _Padded):
            return super().features(ids[0], ids[1])
        for number in work.dropped:
            self._caches.pop((owner, number), None)
        key = owner, work.cache
        if key not in self._caches:
            self._caches[key] = RaggedKVCache(
                self._layer_kv, work.num_rows, work.max_length, self.dtype, self.device, self.attention
            )
        cache = self._caches[key]
        for copy in work.copies:
            cache.copy(*copy)
        return super().forward_ragged(ids, cache.causal_pass(work.rows, work.starts, work.counts))


def cut_over_ranks(target: Target, mesh: distributed.DeviceMesh) -> Target:
    """Cut the decoder layers of a target that lies on the CPU, and move this rank's part to the mesh's device."""
    return TensorParallelTarget(target).to(mesh.device_type)


def cut_layers(body: Any, kv_heads: list[int], rank: int, parts: int) -> None:
    """Keep part ``rank`` of each projection that the family's plan cuts; outputs of those cut along their inputs are
    summed over ranks.

    Raises:
        ConfigError, TargetError: see ``TensorParallelTarget``.
    """
    allowed = parts_allowed(body, kv_heads)
    if parts not in allowed:
        uncut = next(width for width in _widths(body, kv_heads) if width % parts)
        raise ConfigError(
            f"target.shard=tensor_parallel cuts key/value heads and intermediate width over the ranks, and {uncut} "
            f"does not divide by {parts}: this target allows {', '.join(map(str, allowed))} (trainer.devices x "
            "trainer.num_nodes), or take target.shard=fsdp."
        )
    for module, kind in _planned(body):
        _cut(module, kind, rank, parts)


def parts_allowed(body: Any, kv_heads: list[int]) -> list[int]:
    """Into how many parts the layers can be cut.

    Raises:
        TargetError: Transformers declares no such cut for the family, or one that is not supported here.
    """
    if not any(kind == "rowwise" for _, kind in _planned(body)):
        raise TargetError(
            f"Transformers has no tensor-parallel plan for {type(body).__name__}; take target.shard=fsdp."
        )
    widths = _widths(body, kv_heads)
    return [n for n in range(1, min(kv_heads) + 1) if not any(width % n for width in widths)]


def _widths(body: Any, kv_heads: list[int]) -> list[int]:
    """What must divide by the number of parts."""
    return [*kv_heads, *(m.gate_proj.out_features for m in body.modules() if hasattr(m, "gate_proj"))]


def _planned(body: Any) -> list[tuple[nn.Module, str]]:
    """The projections that Transformers' plan cuts, and how: colwise or rowwise."""
    plan: dict[str, str] = getattr(body.config, "base_model_tp_plan", None) or {}
    found = []
    for name, module in body.named_modules():
        kind = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if kind in ("colwise", "rowwise"):
            found.append((module, kind))
        elif kind is not None and kind not in _WHOLE:
            raise TargetError(f"Transformers' plan for {name} is {kind!r}, not supported here; take target.shard=fsdp.")
    return found


def _cut(linear: Any, kind: str, rank: int, parts: int) -> None:
    """Rows of the weight are outputs, columns inputs. A bias of a sum is added once."""
    along = 0 if kind == "colwise" else 1
    linear.weight = nn.Parameter(linear.weight.chunk(parts, along)[rank].clone(), requires_grad=False)
    if linear.bias is not None and kind == "colwise":
        linear.bias = nn.Parameter(linear.bias.chunk(parts)[rank].clone(), requires_grad=False)
    elif linear.bias is not None and rank > 0:
        linear.bias = None
    linear.out_features, linear.in_features = linear.weight.shape
    if kind == "rowwise":
        linear.register_forward_hook(_sum_over_ranks)


def _sum_over_ranks(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output
