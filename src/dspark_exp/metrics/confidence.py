"""Does predicted survival tell the truth? ECE, AUROC and Brier by position, from torchmetrics.

In: conditional confidences and what was accepted. Out: metrics of survivals a_k = prod c_i against "all of 1..k were
accepted", at verified positions only. Knows nothing about models or calibration.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error
from torchmetrics.utilities import dim_zero_cat

NUM_BINS = 20


class SurvivalCalibration(Metric):
    """Keeps survivals and outcomes; ECE uses 20 equal-width bins as the reference does.

    Args:
        block_size: gamma.
    """

    full_state_update = False
    confidence: list[Tensor]
    accepted: list[Tensor]
    verified: list[Tensor]

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        for name in ("confidence", "accepted", "verified"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, confidence_RG: Tensor, accepted: Tensor, verified: Tensor) -> None:
        """Add rounds by conditional confidences [R, G], accepted [R] and verified [R] draft tokens."""
        self.confidence.append(confidence_RG)
        self.accepted.append(accepted)
        self.verified.append(verified)

    def compute(self) -> dict[str, list[Any]]:
        """``ece``, ``auroc``, ``brier`` and ``counts`` by position; NaN where only one outcome was seen.

        ``bins`` holds the reliability diagram of each position: for every non-empty bin its count, mean prediction
        and share of accepted prefixes.
        """
        survival = dim_zero_cat(self.confidence).double().cumprod(-1)
        accepted, verified = dim_zero_cat(self.accepted), dim_zero_cat(self.verified)
        sheet: dict[str, list[Any]] = {"ece": [], "auroc": [], "brier": [], "counts": [], "bins": []}
        for k in range(self.block_size):
            seen = verified > k
            predicted, outcome = survival[seen, k].float(), (accepted[seen] > k).long()
            both = len(outcome.unique()) == 2
            sheet["counts"].append(int(seen.sum()))
            sheet["ece"].append(_value(binary_calibration_error(predicted, outcome, n_bins=NUM_BINS)) if both else _NAN)
            sheet["auroc"].append(_value(binary_auroc(predicted, outcome)) if both else _NAN)
            sheet["brier"].append(_value(((predicted - outcome) ** 2).mean()) if len(outcome) else _NAN)
            sheet["bins"].append(_reliability_bins(predicted, outcome))
        return sheet


def _reliability_bins(predicted: Tensor, outcome: Tensor) -> list[tuple[int, float, float]]:
    index = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    return [
        (int((index == b).sum()), _value(predicted[index == b].mean()), _value(outcome[index == b].float().mean()))
        for b in index.unique().tolist()
    ]


_NAN = float("nan")


def _value(tensor: Tensor) -> float:
    return float(tensor)
