"""Before a long run: does this target, loaded as it is, give plain Transformers' numbers through our taps and passes?

Ends the silent kind of failure in which features are zeros, shifted, or another layer's. Costs a few short forwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_exp.errors import TargetError
from dspark_exp.targets.adapter import Target

_LENGTHS = (7, 12)
_MIN_COSINE = 0.999


@torch.no_grad()
def check_target(target: Target) -> None:
    """Compare taps, final states and ragged passes with the model's own hidden states on two short rows.

    Raises:
        TargetError: naming the layer that differs, and by how much.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, target.facts.num_usable_tokens, (n,), generator=generator) for n in _LENGTHS]
    ids = torch.zeros(len(rows), max(_LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    taps, final = target.features(ids.to(target.device), mask.to(target.device))
    cache = target.new_cache(len(rows), max(_LENGTHS))
    plan = cache.causal_pass([0, 1], [0, 0], list(_LENGTHS))
    flat_taps, flat_final = target.forward_ragged(torch.cat(rows).to(target.device), plan)
    first = 0
    for index, row in enumerate(rows):
        out = target.model(row[None].to(target.device), output_hidden_states=True, use_cache=False)
        span = slice(first, first + len(row))
        wanted = torch.cat([out.hidden_states[layer + 1] for layer in target.facts.layer_ids], dim=-1)[0]
        for kind, tap, last in (
            ("a padded batch", taps[index, : len(row)], final[index, : len(row)]),
            ("a ragged pass", flat_taps[span], flat_final[span]),
        ):
            _compare(tap, wanted, target, kind)
            _require(target.logits(last), out.logits[0], "the logits", kind, target.facts.num_usable_tokens)
        first += len(row)


def _compare(found: Tensor, wanted: Tensor, target: Target, kind: str) -> None:
    width = target.facts.hidden_size
    for number, layer in enumerate(target.facts.layer_ids):
        part = slice(number * width, (number + 1) * width)
        _require(found[:, part], wanted[:, part], f"the output of layer {layer}", kind, width)


def _require(found: Tensor, wanted: Tensor, what: str, kind: str, width: int) -> None:
    cosine = torch.nn.functional.cosine_similarity(found[..., :width].float(), wanted[..., :width].float(), dim=-1)
    lowest = float(cosine.min())
    if not lowest >= _MIN_COSINE:
        raise TargetError(
            f"Self-test of the target failed: in {kind}, {what} differs from plain Transformers (cosine {lowest:.4f}, "
            f"expected at least {_MIN_COSINE}). Features would be wrong; nothing was computed."
        )
