"""Lossless verification of a drafted block: a pure function of distributions, tokens and uniform numbers.

In: p_d that was really sampled from, p_t, drafted tokens, lengths to verify. Out: how many are accepted and the token
the target adds. The emitted sequence has exactly the target's distribution. Knows nothing about models or requests.

Shapes: R requests, G drafted positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_exp.decoding.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """Accepted draft tokens of each request and the token that follows them."""

    num_accepted: Tensor  # [R]
    next_token: Tensor  # [R]
    overlap: Tensor | None = None  # [R, G] sum(min(p_d, p_t)), the analytic acceptance rate of each position (Eq. 8)


def verify_block(
    draft_probs_RGV: Tensor,
    target_probs_RGV: Tensor,
    tokens_RG: Tensor,
    lengths_R: Tensor,
    accept_uniform_RG: Tensor,
    next_uniform_R: Tensor,
    with_overlap: bool = False,
) -> Verdict:
    """Accept x_k with probability min(1, p_t/p_d); resample the first rejection from the positive part of p_t - p_d.

    Args:
        draft_probs_RGV: distributions the tokens were drawn from.
        target_probs_RGV: [R, G+1, V], the target's distribution at the anchor and after each drafted token; rows past
            ``lengths`` are not read.
        tokens_RG: drafted tokens; lengths_R: how many of them are verified (0..G). The choice of length must not
            depend on the tokens at or after the cut (non-anticipating), else exactness is lost.
        accept_uniform_RG, next_uniform_R: independent uniform numbers in [0, 1).
        with_overlap: also 1 - TV(p_d, p_t) of every position, which confidences learn (Eq. 8); positions
            past ``lengths`` have none that means anything.
    """
    block_size = tokens_RG.shape[1]
    index = tokens_RG[..., None]
    drafted = draft_probs_RGV.gather(-1, index).squeeze(-1).double()
    wanted = target_probs_RGV[:, :block_size].gather(-1, index).squeeze(-1).double()
    within = torch.arange(block_size, device=tokens_RG.device) < lengths_R[:, None]
    accepted = (accept_uniform_RG.double() * drafted < wanted) & within
    num_accepted = accepted.int().cumprod(-1).sum(-1)
    rows = torch.arange(len(tokens_RG), device=tokens_RG.device)
    target = target_probs_RGV[rows, num_accepted]
    rejected = num_accepted < lengths_R
    draft = draft_probs_RGV[rows, num_accepted.clamp(max=block_size - 1)] * rejected[:, None]
    residual = (target - draft).clamp(min=0)
    # p_t == p_d up to rounding leaves nothing: such a rejection has probability zero
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    overlap = None
    if with_overlap:
        overlap = torch.minimum(draft_probs_RGV, target_probs_RGV[:, :block_size]).sum(-1).clamp(max=1)
    return Verdict(num_accepted, draw(residual, next_uniform_R), overlap)


def verify_greedy(target_tokens: Tensor, tokens_RG: Tensor, lengths_R: Tensor) -> Verdict:
    """Verification at temperature 0: a drafted token is accepted where it is the target's most likely one.

    Args:
        target_tokens: [R, G+1], the target's most likely token at the anchor and after each drafted token.
        tokens_RG: drafted tokens; lengths_R: how many of them are verified.
    """
    within = torch.arange(tokens_RG.shape[1], device=tokens_RG.device) < lengths_R[:, None]
    num_accepted = ((tokens_RG == target_tokens[:, :-1]) & within).int().cumprod(-1).sum(-1)
    return Verdict(num_accepted, target_tokens.gather(1, num_accepted[:, None]).squeeze(1))
