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
        if self.temperature != 1:
            logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, index, ordered)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Token ids [...] and the distribution [..., V] they were drawn from; greedy needs and gives none."""
        if self.temperature == 0:
            return logits.argmax(-1), None
        probs = self.probs(logits)
        return draw(probs, uniform), probs


_BLOCK = 128  # tokens whose probabilities are summed before the search


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [...] from [..., V] at uniform numbers [...] in [0, 1), by inverse CDF in two steps.

    First the block of 128 tokens, then the token: the vocabulary is summed once and never scanned in float64.
    A token of probability zero is never returned.
    """
    flat = probs.reshape(-1, probs.shape[-1])
    padding = -flat.shape[1] % _BLOCK
    blocks = (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(len(flat), -1, _BLOCK)
    sums = blocks.sum(-1)
    cdf = sums.double().cumsum(-1)
    threshold = uniform.reshape(-1, 1).double() * cdf[:, -1:]
    block = torch.minimum(torch.searchsorted(cdf, threshold, right=True), _last_positive(sums)[:, None])
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks[torch.arange(len(flat), device=flat.device), block[:, 0]]
    inside = torch.searchsorted(chosen.double().cumsum(-1), threshold - before, right=True)[:, 0]
    token = block[:, 0] * _BLOCK + torch.minimum(inside, _last_positive(chosen))
    return token.view(probs.shape[:-1])


def _last_positive(values: Tensor) -> Tensor:
    """Index of the last value above zero of each row."""
    return values.shape[-1] - 1 - (values.flip(-1) > 0).int().argmax(-1)
