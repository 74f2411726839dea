"""Values that cross rooms, and nothing else. Knows no model, no file, no config.

Shapes: N sequences, S tokens, A anchors, G block size, V vocabulary, d hidden, m tapped layers,
B tokens of one flattened forward, R requests of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a target's config says about its body.

    Attributes:
        num_kv_heads, head_dim: of full-attention layers, which is what a drafter's layers take.
        rope_parameters: of full-attention layers.
        layer_kv: key/value heads and head width of every layer, for the key/value rows.
        layer_windows: attention window of every layer in tokens, None = unlimited.
        body: layer style of drafters for this family: ``qwen3`` or ``gemma4``.
        keys_are_values: full-attention layers have no value projection.
        logit_softcap: logits become cap * tanh(logits / cap); None = no cap.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, object]
    max_position_embeddings: int
    layer_kv: tuple[tuple[int, int], ...]
    layer_windows: tuple[int | None, ...]
    body: str = "qwen3"
    keys_are_values: bool = False
    logit_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TargetFacts(Architecture):
    """What a drafter must know about its target. ``layer_ids`` are 0-based; layer i's output = hidden_states[i+1]."""

    name: str
    vocab_size: int
    num_usable_tokens: int
    layer_ids: tuple[int, ...]
    mask_token_id: int
    pad_token_id: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class TargetFeatures:
    """What the target gives for N sequences: the only thing a drafter learns from (DESIGN section 4)."""

    input_ids: Tensor  # [N, S]
    supervised: Tensor  # [N, S] bool
    taps: Tensor  # [N, S, m*d]
    final: Tensor  # [N, S, d], exactly what the LM head eats
    lengths: Tensor | None = None  # [N] tokens before padding; None = no padding


@dataclass(frozen=True)
class AnchorBlocks:
    """A anchors per sequence. ``live[n, a, k]`` = slot k predicts a supervised token inside the sequence."""

    positions: Tensor  # [N, A] position t of each anchor
    labels: Tensor  # [N, A, G] token t+k, k from 1
    previous: Tensor  # [N, A, G] token t+k-1, what a sequential head conditions on when teacher-forced
    live: Tensor  # [N, A, G] bool, a prefix along k


@dataclass(frozen=True)
class FrozenHead:
    """Embedding (its scale included) and LM head of the target, held by reference.

    ``num_usable_tokens``: rows from here on are padding; None = no padding. ``softcap``: see ``TargetFacts``.
    """

    embedding: nn.Embedding
    lm_head: nn.Linear
    num_usable_tokens: int | None = None
    softcap: float | None = None

    @property
    def rows(self) -> Tensor:
        """LM-head rows of tokens that exist, [usable, d]."""
        return self.lm_head.weight[: self.num_usable_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> capped logits [..., V] in the head's dtype; padded rows are -inf, so they are never drawn.

        Not widened here: softmax widens as it reads, and what it reads is what is sampled from.
        """
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits.float() / self.softcap)
        if self.num_usable_tokens is not None:
            logits[..., self.num_usable_tokens :] = float("-inf")
        return logits


class KVPass(Protocol):
    """One forward pass of B flattened tokens over per-request key/value rows."""

    row_B: Tensor
    position_B: Tensor

    def write(self, layer: int, key_BHD: Tensor, value_BHD: Tensor) -> None:
        """Store keys and values at (row, position) without attending."""

    def attend(
        self,
        layer: int,
        query_BHD: Tensor,
        key_BHD: Tensor,
        value_BHD: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store keys and values, then attend every query to the keys it may see; returns [B, H, D].

        ``window``: keys this many positions behind a query, or more, are not seen.
        """


class KVStore(Protocol):
    """Key/value rows of R requests, each with its own length."""

    def causal_pass(self, rows: list[int], starts: list[int], counts: list[int]) -> KVPass:
        """Tokens start .. start+count-1 of each row; a query sees its row's positions up to its own."""

    def block_pass(self, rows: list[int], starts: list[int], count: int) -> KVPass:
        """``count`` tokens per row that all see each other and everything before ``start``."""

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row onto another one."""


@dataclass(frozen=True)
class Proposal:
    """A drafted block. ``probs`` is the distribution really sampled from, after bias, temperature, top-k/p.

    ``head_s``: host seconds of the sequential head's loop (on a GPU: of launching it).
    """

    tokens: Tensor  # [R, G]
    probs: Tensor | None  # [R, G, V]; None when greedy: each token is the most likely one
    confidence: Tensor | None  # [R, G] predicted conditional acceptance, or None
    head_s: float = 0.0


class Sampler(Protocol):
    """Turns logits into tokens."""

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Token ids [...] at uniform numbers [...] in [0, 1), and the distribution [..., V] they were drawn from.

        The distribution is what temperature, top-k and top-p leave; None when greedy.
        """


def autocast_dtype(device: torch.device, default: torch.dtype) -> torch.dtype:
    """The dtype matrix products run in under the active autocast, else ``default``."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else default
