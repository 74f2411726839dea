"""Sequential heads: a prefix-dependent logit bias ``features @ w2^T`` on top of the parallel logits (Eq. 4).

In: previous tokens and the backbone's hidden states. Out: bias features of width r; the vocabulary product is
left to the caller, so that a loss can evaluate it chunk by chunk. Teacher-forced over a block, or step by step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_exp.errors import ConfigError


class MarkovHead(nn.Module):
    """First-order transitions, B(x_{k-1}, .) = W1[x_{k-1}] W2 (Eq. 5). Ignores the hidden state.

    ``markov_w1`` starts at unit scale and ``markov_w2`` at zero: the bias starts at exactly nothing, and yet ``w2``
    receives full-size gradients from the first step (with both near zero, the product learns late).
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self._build(hidden_size)

    def _build(self, hidden_size: int) -> None:
        """Extra layers of the variants."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.markov_w1.weight, std=1.0)
        nn.init.zeros_(self.markov_w2.weight)

    def embed(self, previous: Tensor) -> Tensor:
        """W1[x_{k-1}], [..., r]."""
        return self.markov_w1(previous)

    def block(self, previous_G: Tensor, hidden_Gd: Tensor) -> Tensor:
        """Bias features [..., G, r] of a whole teacher-forced block."""
        return self.embed(previous_G)

    def start(self, num_blocks: int, like: Tensor) -> Tensor:
        """State before the first slot, [num_blocks, r]."""
        return like.new_zeros(num_blocks, self.rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bias features [R, r] of one slot and the next state."""
        return self.embed(previous), state


class GatedHead(MarkovHead):
    """A sigmoid gate of [h_k ; W1[x_{k-1}]] scales the Markov embedding (in the released code, not in the paper)."""

    def _build(self, hidden_size: int) -> None:
        self.gate_proj = nn.Linear(hidden_size + self.rank, self.rank)

    def block(self, previous_G: Tensor, hidden_Gd: Tensor) -> Tensor:
        embedded = self.embed(previous_G).to(hidden_Gd.dtype)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden_Gd, embedded], dim=-1))) * embedded

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(previous, hidden), state


class RnnHead(MarkovHead):
    """A gated recurrent state over the block's prefix (Eq. 6), one linear map for gate, candidate and output."""

    def _build(self, hidden_size: int) -> None:
        self.joint_proj = nn.Linear(2 * self.rank + hidden_size, 3 * self.rank)

    def block(self, previous_G: Tensor, hidden_Gd: Tensor) -> Tensor:
        embedded = self.embed(previous_G).to(hidden_Gd.dtype)
        # the parts of the product that need no state are done for all slots at once
        from_state, from_embedding, from_hidden = self.joint_proj.weight.split(
            [self.rank, self.rank, hidden_Gd.shape[-1]], dim=1
        )
        ready = nn.functional.linear(
            torch.cat([embedded, hidden_Gd], dim=-1),
            torch.cat([from_embedding, from_hidden], dim=1),
            self.joint_proj.bias,
        )
        state = torch.zeros_like(ready[..., 0, : self.rank])
        outputs = []
        for slot in range(ready.shape[-2]):
            output, state = self._update(ready[..., slot, :] + nn.functional.linear(state, from_state), state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed(previous).to(hidden.dtype)
        return self._update(self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)), state)

    @staticmethod
    def _update(projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = projected.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


HEADS: dict[str, type[MarkovHead]] = {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


def build_head(kind: str, vocab_size: int, hidden_size: int, rank: int) -> MarkovHead:
    """A head by name.

    Raises:
        ConfigError: unknown name.
    """
    if kind not in HEADS:
        raise ConfigError(f"drafter.network.head={kind!r} is unknown; choose from {', '.join(HEADS)}.")
    return HEADS[kind](vocab_size, hidden_size, rank)


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]]) (Eq. 7): depends on x_{k-1}, never on x_k. Returns logits."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., d] and [..., r] -> logits [...] in float32."""
        features = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        return self.proj(features).squeeze(-1).float()
