"""What a round moves between device and host, and between the requests that draft and all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark_exp.contracts import Proposal
from dspark_exp.decoding.verification import Verdict


@dataclass(frozen=True)
class Verified:
    """A round as the host sees it."""

    drafted: list[list[int]]  # [R][G]
    accepted: list[int]
    next_token: list[int]
    confidence: np.ndarray | None  # [R, G]
    overlap: np.ndarray | None = None  # [R, G]

    @property
    def real(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What a round keeps by drafted position, in its order."""
        return self.confidence, self.overlap


def widened(proposal: Proposal, drafting: list[int], num_requests: int) -> Proposal:
    """A proposal for some requests as one for all; rows of the others are zero and are not read."""
    index = torch.tensor(drafting, device=proposal.tokens.device)

    def wide(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return part.new_zeros(num_requests, *part.shape[1:]).index_copy_(0, index, part)

    tokens = wide(proposal.tokens)
    assert tokens is not None
    return replace(proposal, tokens=tokens, probs=wide(proposal.probs), confidence=wide(proposal.confidence))


def fetch(block: Tensor, verdict: Verdict, proposal: Proposal | None) -> Verified:
    """Everything the host needs of a round in one transfer; real numbers travel as the bits of a float32."""
    real = {"confidence": None if proposal is None else proposal.confidence, "overlap": verdict.overlap}
    sent = {name: part for name, part in real.items() if part is not None}
    parts = [block[:, 1:], verdict.num_accepted[:, None], verdict.next_token[:, None]]
    parts += [part.float().contiguous().view(torch.int32) for part in sent.values()]
    host = torch.cat([part.long() for part in parts], dim=1).cpu().numpy()
    size = block.shape[1] - 1
    bits = np.split(host[:, size + 2 :].astype(np.int32).view(np.float32), len(sent) or 1, axis=1)
    arrived: dict[str, np.ndarray | None] = dict.fromkeys(real) | dict(zip(sent, bits, strict=False))
    return Verified(host[:, :size].tolist(), host[:, size].tolist(), host[:, size + 1].tolist(), **arrived)


def spread(values_B: Tensor, chosen: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """[B, ...] -> [R, G+1, ...]; what was not verified is zero and is not read."""
    if chosen is None:
        return values_B.view(*shape, *values_B.shape[1:])
    rows = shape[0] * shape[1]
    spread = values_B.new_zeros(rows, *values_B.shape[1:]).index_copy_(0, chosen, values_B)
    return spread.view(*shape, *values_B.shape[1:])
