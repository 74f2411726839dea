"""Block drafters: DFlash (parallel logits alone) and DSpark (with a sequential and a confidence head).

In: target features and anchors, or a batch of requests. Out: hidden states and bias features for the loss, or a
proposal. Knows nothing about losses, optimizers or verification.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_exp.contracts import AnchorBlocks, FrozenHead, KVStore, Proposal, Sampler, TargetFacts, TargetFeatures
from dspark_exp.drafters.backbone import ParallelBackbone
from dspark_exp.drafters.geometry import Geometry, check_positive, initialise
from dspark_exp.drafters.heads import ConfidenceHead, build_head
from dspark_exp.drafters.packing import Packing


@dataclass(frozen=True)
class BlockOutput:
    """What a loss needs of one batch of blocks; logits = hidden @ lm_head^T + bias_features @ bias_weight^T."""

    hidden: Tensor  # [N, A, G, d]
    bias_features: Tensor | None  # [N, A, G, r]
    bias_weight: Tensor | None  # [V, r]
    confidence_logits: Tensor | None  # [N, A, G]


class BlockDrafter(nn.Module):
    """A parallel drafter over the target's embedding and LM head, which it holds by reference.

    Args:
        facts: the target's facts.
        frozen: the target's embedding and LM head.
        num_layers: depth of the backbone.
        block_size: gamma, tokens proposed a round.
        head: sequential head: ``None`` (DFlash), ``markov``, ``gated`` or ``rnn``.
        head_rank: r, width of the head's embedding and bias.
        confidence_head: whether to predict conditional acceptance.
        confidence_with_markov: whether that head also reads W1[x_{k-1}] (Eq. 7); needs a sequential head.
        intermediate_size: feed-forward width; null = the target's.
        attention: training attention backend: auto, eager, sdpa or flex.
        checkpoint: activation checkpointing: layers are computed again in the backward pass, memory falls.
        window: sliding window of the attention in tokens; null = the whole context.

    Raises:
        ConfigError: a size below one, an unknown head or backend.
    """

    autoregressive = False

    def __init__(
        self,
        facts: TargetFacts,
        frozen: FrozenHead,
        num_layers: int,
        block_size: int,
        head: str | None = None,
        head_rank: int = 256,
        confidence_head: bool = False,
        confidence_with_markov: bool = True,
        intermediate_size: int | None = None,
        attention: str = "auto",
        checkpoint: bool = False,
        window: int | None = None,
    ) -> None:
        check_positive(num_layers=num_layers, block_size=block_size, **({} if window is None else {"window": window}))
        geometry = Geometry.of(facts, intermediate_size)
        super().__init__()
        self.block_size, self.mask_token_id, self.num_layers = block_size, facts.mask_token_id, num_layers
        self.geometry = geometry
        self.backbone = ParallelBackbone(geometry, num_layers, attention, checkpoint, window)
        self._frozen = (frozen,)  # a tuple, so that the target's weights are not registered, saved or trained
        initialise(self)
        self.markov_head, self.confidence_head = None, None
        self.head_kind, self.confidence_reads_markov = head, confidence_with_markov and head is not None
        if head is not None:
            check_positive(head_rank=head_rank)
            self.markov_head = build_head(head, geometry.vocab_size, geometry.hidden_size, head_rank)
            initialise(self.markov_head)
            self.markov_head.reset_parameters()
        if confidence_head:
            embedded_size = head_rank if self.confidence_reads_markov else 0
            self.confidence_head = ConfidenceHead(geometry.hidden_size + embedded_size)
            initialise(self.confidence_head)

    @property
    def frozen(self) -> FrozenHead:
        return self._frozen[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.fc.weight.dtype

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters of the sequential and confidence heads, which may take a learning rate of their own."""
        heads = [self.markov_head, self.confidence_head]
        return [parameter for head in heads if head is not None for parameter in head.parameters()]

    # training

    def layers_alone(self) -> list[nn.Module]:
        """Layers whose weights are needed during their own call alone, in training."""
        return list(self.backbone.layers)

    def compile_training(self) -> None:
        """Compile the backbone's training pass; names of parameters stay as they are, decoding is not touched."""
        self.backbone.compile(dynamic=True)

    def forward(self, features: TargetFeatures, blocks: AnchorBlocks) -> BlockOutput:
        """Teacher-forced blocks of a batch (no token after an anchor's block, no feature at or after it, is read).

        Hidden states of blocks without a live slot are zero: they are not computed.
        """
        packing = Packing.of(blocks.positions, blocks.live.any(-1), features.taps.shape[1])
        block = self._embed_block(packing.blocks.pack(blocks.previous[..., 0]))
        hidden = self.backbone(packing.context.pack(features.taps).to(self.dtype), block, packing)
        hidden = packing.blocks.unpack(hidden)
        bias_features, bias_weight = None, None
        if self.markov_head is not None:
            bias_features = self.markov_head.block(blocks.previous, hidden)
            bias_weight = self.markov_head.markov_w2.weight
        return BlockOutput(hidden, bias_features, bias_weight, self._confidence(hidden, blocks.previous))

    def _embed_block(self, anchor_ids: Tensor) -> Tensor:
        """[...] anchors -> [..., G, d]: the anchor, then masks."""
        ids = anchor_ids.new_full((*anchor_ids.shape, self.block_size), self.mask_token_id)
        ids[..., 0] = anchor_ids
        return self.frozen.embedding(ids).to(self.dtype)

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        embedded = None
        if self.confidence_reads_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.embed(previous)
        return self.confidence_head(hidden, embedded)

    # decoding

    def cache_geometry(self) -> tuple[int, int, int]:
        """Layers, key/value heads and head width of the key/value rows this drafter writes."""
        return self.num_layers, self.geometry.num_kv_heads, self.geometry.head_dim

    def extend(
        self, store: KVStore, rows: list[int], starts: list[int], counts: list[int], taps_BE: Tensor, next_B: Tensor
    ) -> None:
        """Take in the target's features at positions start .. start+count-1 of each row. ``next_B`` is not needed."""
        self.backbone.extend(taps_BE.to(self.dtype), store.causal_pass(rows, starts, counts))

    def propose(
        self,
        store: KVStore,
        rows: list[int],
        anchors: list[int],
        anchor_ids: Tensor,
        carry: None,
        sampler: Sampler,
        uniform: Tensor,
    ) -> Proposal:
        """Draft one block per row; ``anchors[r]`` is the anchor's position, ``uniform`` [R, G] drives the draws."""
        plan = store.block_pass(rows, anchors, self.block_size)
        block = self._embed_block(anchor_ids)
        hidden = self.backbone.decode(block.flatten(0, 1), plan).view(block.shape)
        return self._sample_block(hidden, self.frozen.logits(hidden), anchor_ids, sampler, uniform)

    def _sample_block(
        self, hidden: Tensor, base_logits: Tensor, anchor_ids: Tensor, sampler: Sampler, uniform: Tensor
    ) -> Proposal:
        head, started = self.markov_head, time.perf_counter()
        if head is None:
            tokens, probs = sampler.sample(base_logits, uniform)
            previous = torch.cat([anchor_ids[:, None], tokens[:, :-1]], dim=1)
        else:
            state = head.start(hidden.shape[0], hidden)
            drawn: list[Tensor] = []
            distributions: list[Tensor] = []
            token = anchor_ids
            for slot in range(self.block_size):
                features, state = head.step(token, hidden[:, slot], state)
                logits = base_logits[:, slot] + head.markov_w2(features.to(head.markov_w2.weight.dtype))
                token, distribution = sampler.sample(logits, uniform[:, slot])
                drawn.append(token)
                distributions += [] if distribution is None else [distribution]
            tokens = torch.stack(drawn, 1)
            probs = torch.stack(distributions, 1) if distributions else None
            previous = torch.cat([anchor_ids[:, None], tokens[:, :-1]], dim=1)
        head_s = 0.0 if head is None else time.perf_counter() - started
        confidence = self._confidence(hidden, previous)
        return Proposal(tokens, probs, None if confidence is None else confidence.sigmoid(), head_s)


class DFlashDrafter(BlockDrafter):
    """The parallel baseline: every position is predicted independently of the tokens really sampled."""


class DSparkDrafter(BlockDrafter):
    """Semi-autoregressive: parallel backbone, sequential head, confidence head."""
