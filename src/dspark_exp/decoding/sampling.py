"""Sampling settings and the distributions they define.

In: logits. Out: the distribution really sampled from, and draws from it by inverse CDF. One uniform number is one
token, so a request with its own generator is the same whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_exp.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Temperature (0 = greedy), then top-k (0 = off), then top-p (1 = off).

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"Sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1; got temperature={self.temperature}, "
                f"top_k={self.top_k}, top_p={self.top_p}."
            )

    def probs(self, logits: Tensor) -> Tensor:
        """[..., V] probabilities in float32; one-hot at temperature 0."""
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= self.top_p] = 0.0
            probs = torch.zeros_like(probs).scatter(-1, index, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    @staticmethod
    def draw(probs: Tensor, uniform: Tensor) -> Tensor:
        """Token ids [...] drawn from [..., V] at uniform numbers [...] in [0, 1)."""
        return draw(probs, uniform)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in float64. Never returns a token of probability zero."""
    cdf = probs.double().cumsum(-1)
    threshold = uniform.double()[..., None] * cdf[..., -1:]
    token = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(token, last)
