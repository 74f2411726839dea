"""Training objectives: which slots count, with what weight, and which terms are summed.

In: a drafter's output and the target's features. Out: a loss and the terms to log. Each term is a sum over live
slots divided by the sum of weights over ALL ranks. Knows nothing about optimizers or trackers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_exp.contracts import AnchorBlocks, FrozenHead, TargetFeatures
from dspark_exp.errors import ConfigError
from dspark_exp.objectives.fused import SlotLosses, slot_losses

SumOverRanks = Callable[[Tensor], Tensor]


class _BlockOutput(Protocol):
    hidden: Tensor
    bias_features: Tensor | None
    bias_weight: Tensor | None
    confidence_logits: Tensor | None


@dataclass(frozen=True)
class ObjectiveResult:
    """``loss`` is this rank's share: the sum over ranks is the loss of the joined batch."""

    loss: Tensor
    terms: dict[str, Tensor]  # weighted sums to be divided by ``weight``, this rank's share
    weight: Tensor  # sum of weights over all ranks
    accept_sum: Tensor  # [G] sum of analytic acceptance by position
    accept_count: Tensor  # [G]


@dataclass(frozen=True)
class BlockObjective:
    """ce*CE + l1*L1 + confidence*BCE with position weight exp(-(k-1)/decay) (Eq. 9-12).

    Args:
        ce, l1, confidence: weights of the terms at the end of training.
        decay: position decay in slots (released code: 4.0; the paper's text: gamma).
        ramp: share of training over which the objective moves linearly from CE alone (weight ce + l1) to
            (ce, l1). 0 = the paper's constant weights.

    Raises:
        ConfigError: negative weights, no term at all, decay not above zero, ramp outside [0, 1].
    """

    ce: float
    l1: float
    confidence: float
    decay: float = 4.0
    ramp: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ce, self.l1, self.confidence) < 0 or self.ce + self.l1 <= 0:
            raise ConfigError(
                f"drafter.objective needs weights of at least 0 and ce + l1 above 0; got ce={self.ce}, l1={self.l1}, "
                f"confidence={self.confidence}."
            )
        if self.decay <= 0 or not 0 <= self.ramp <= 1:
            raise ConfigError(
                f"drafter.objective.decay={self.decay} must be above 0 and ramp={self.ramp} within [0, 1]."
            )

    def weights_at(self, progress: float) -> tuple[float, float]:
        """(ce, l1) after a share ``progress`` of training."""
        blend = 1.0 if self.ramp == 0 else min(1.0, progress / self.ramp)
        return (1 - blend) * (self.ce + self.l1) + blend * self.ce, blend * self.l1

    def __call__(
        self,
        output: _BlockOutput,
        blocks: AnchorBlocks,
        features: TargetFeatures,
        frozen: FrozenHead,
        progress: float,
        sum_over_ranks: SumOverRanks,
    ) -> ObjectiveResult:
        """Loss of one batch of blocks. A batch with nothing live yields a finite zero loss with zero gradients."""
        block_size = blocks.labels.shape[-1]
        slot = torch.arange(block_size, device=blocks.live.device)
        weight_NAG = torch.exp(-slot / self.decay) * blocks.live
        total_weight = sum_over_ranks(weight_NAG.sum().float())
        picked = _sorted_live(blocks, features.final.shape[1])
        weights = weight_NAG.flatten()[picked.index] / total_weight.clamp(min=1e-6)
        ce, l1 = self.weights_at(progress)
        bias = output.bias_features
        losses = slot_losses(
            output.hidden.flatten(0, -2)[picked.index],
            frozen.rows,
            None if bias is None else bias.flatten(0, -2)[picked.index],
            _usable(output.bias_weight, len(frozen.rows)),
            features.final.flatten(0, 1)[picked.context],
            picked.position,
            blocks.labels.flatten()[picked.index],
            weights,
            ce=ce,
            l1=l1,
            softcap=frozen.softcap,
        )
        loss, terms = losses.total, _weighted_terms(losses, weights)
        if output.confidence_logits is not None:
            logits = output.confidence_logits.flatten()[picked.index]
            bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, losses.accept, reduction="none")
            confidence = (weights * bce).sum()
            loss = loss + self.confidence * confidence
            terms["confidence"] = confidence.detach()
            terms["confidence_error"] = (weights * (logits.detach().sigmoid() - losses.accept).abs()).sum()
        sums, counts = _by_slot(losses.accept, picked.index % block_size, block_size)
        return ObjectiveResult(loss, terms, total_weight, sums, counts)


@dataclass(frozen=True)
class TrainingTimeTestObjective:
    """Soft cross-entropy of every training-time-test step, weighted by ``step_decay`` per step (Eagle3).

    Args:
        step_decay: factor per step (released code: 0.8).
        convention: which positions count and what divides the sum.
            ``live``: position i at step j counts while tokens i+1 .. i+j+2 are supervised, so that every trained
            position predicts a token the target produced; divided by the sum of weights, as the block objectives.
            ``released``: the released code's mask (position i at step j counts if token i+j is supervised and not the
            last one of its row, so the first draft position of a reply is never trained) and its divisor, all
            positions of the batch, prompts and padding included.

    Raises:
        ConfigError: step_decay outside (0, 1], or an unknown convention.
    """

    step_decay: float = 0.8
    convention: str = "live"

    def __post_init__(self) -> None:
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"drafter.objective.step_decay={self.step_decay} must lie in (0, 1].")
        if self.convention not in ("live", "released"):
            raise ConfigError(f"drafter.objective.convention={self.convention!r}: choose live or released.")

    def __call__(
        self,
        normed_steps: list[Tensor],
        features: TargetFeatures,
        frozen: FrozenHead,
        sum_over_ranks: SumOverRanks,
    ) -> ObjectiveResult:
        """Position i at step j predicts token i+j+2 and is compared with the target's distribution at i+j+1."""
        ids = features.input_ids
        num_sequences, length = ids.shape
        factors = [self.step_decay**step for step in range(len(normed_steps))]
        live_steps = self._live(features, len(normed_steps))
        if self.convention == "released":
            total_weight = sum_over_ranks(torch.tensor(float(ids.numel()), device=ids.device))
        else:
            parts = [mask.sum() * factor for mask, factor in zip(live_steps, factors, strict=True)]
            total_weight = sum_over_ranks(torch.stack(parts).sum())
        row, column = torch.cat([m.nonzero() for m in live_steps]).T
        step_M = torch.cat([torch.full((int(m.sum()),), j, device=ids.device) for j, m in enumerate(live_steps)])
        flat = row * length + column + step_M + 1
        order = flat.argsort(stable=True)
        row, column, step_M = row[order], column[order], step_M[order]
        context, position = flat[order].unique_consecutive(return_inverse=True)
        weights = torch.tensor(factors, device=ids.device)[step_M] / total_weight.clamp(min=1e-6)
        hidden = torch.stack(normed_steps).view(len(normed_steps), num_sequences * length, -1)
        losses = slot_losses(
            hidden[step_M, row * length + column],
            frozen.rows,
            None,
            None,
            features.final.flatten(0, 1)[context],
            position,
            ids[row, (column + step_M + 2).clamp(max=length - 1)],
            weights,
            ce=0.0,
            l1=0.0,
            soft_ce=1.0,
            softcap=frozen.softcap,
        )
        sums, counts = _by_slot(losses.accept, step_M, len(normed_steps))
        return ObjectiveResult(losses.total, _weighted_terms(losses, weights), total_weight, sums, counts)

    def needed(self, features: TargetFeatures, num_steps: int) -> Tensor:
        """[N, S] mask of the positions that count at any step."""
        return torch.stack(self._live(features, num_steps)).any(0)

    def _live(self, features: TargetFeatures, num_steps: int) -> list[Tensor]:
        """[N, S] masks of the positions that count at each step; i+j+1 is always inside the row."""
        supervised = features.supervised
        if self.convention == "released":
            lengths = supervised.shape[1] if features.lengths is None else features.lengths[:, None]
            mask = supervised & (torch.arange(supervised.shape[1], device=supervised.device) != lengths - 1)
            return [_ahead(mask, step) for step in range(num_steps)]
        live = _ahead(supervised, 1)
        steps = []
        for step in range(num_steps):
            live = live & _ahead(supervised, step + 2)
            steps.append(live)
        return steps


@dataclass(frozen=True)
class _Picked:
    index: Tensor  # [M] into the flattened [N, A, G], sorted by context position
    context: Tensor  # [U] distinct flattened context positions n*S + t+k-1
    position: Tensor  # [M] into ``context``


def _sorted_live(blocks: AnchorBlocks, length: int) -> _Picked:
    num_sequences, _, block_size = blocks.labels.shape
    index = blocks.live.flatten().nonzero().squeeze(-1)
    slots = blocks.positions[..., None] + torch.arange(block_size, device=index.device)
    sequence = torch.arange(num_sequences, device=index.device)[:, None, None]
    key = (sequence * length + slots).flatten()[index]
    order = key.argsort(stable=True)
    distinct, position = key[order].unique_consecutive(return_inverse=True)
    return _Picked(index[order], distinct, position)


def _usable(weight: Tensor | None, rows: int) -> Tensor | None:
    """The rows of tokens that exist; the tensor itself where there is no padding, so that nothing is copied."""
    return weight if weight is None or len(weight) == rows else weight[:rows]


def _weighted_terms(losses: SlotLosses, weights: Tensor) -> dict[str, Tensor]:
    return {
        "ce": (weights * losses.ce).sum(),
        "l1": (weights * losses.l1).sum(),
        "soft_ce": (weights * losses.soft_ce).sum(),
    }


def _ahead(values_NS: Tensor, count: int) -> Tensor:
    """values[i + count], false past the end."""
    return torch.nn.functional.pad(values_NS[:, count:], (0, min(count, values_NS.shape[1])))


def _by_slot(values: Tensor, slot: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    sums = values.new_zeros(block_size).index_add(0, slot, values)
    counts = values.new_zeros(block_size).index_add(0, slot, torch.ones_like(values))
    return sums, counts
