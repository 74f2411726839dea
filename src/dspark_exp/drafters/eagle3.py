"""Eagle3, the autoregressive baseline: one layer that feeds its own hidden state back, token by token.

In: target features and tokens. Out: hidden states of the training-time-test steps, or a proposal.
Knows nothing about losses or verification. Conventions of the released implementation:
position i pairs the target's features at i with token i+1; step j runs at RoPE position i + j and sees step 0's
keys up to i and, of later steps, only keys of its own position; the residual stream is the un-normed hidden state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark_exp.contracts import FrozenHead, KVPass, KVStore, Proposal, Sampler, TargetFacts, TargetFeatures
from dspark_exp.drafters.geometry import DraftLayer, Geometry, RMSNorm, check_positive, initialise
from dspark_exp.drafters.packing import Index


class Eagle3Layer(DraftLayer):
    """Attention whose inputs are [norm(embedding) ; norm(hidden)], then a feed-forward layer."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry, 2 * geometry.hidden_size)
        self.hidden_norm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)


class Eagle3Drafter(nn.Module):
    """One autoregressive layer over the target's embedding and LM head (held by reference).

    Args:
        facts, frozen: the target's facts and its embedding and LM head.
        block_size: gamma, tokens proposed a round; also the horizon of the training-time test.
        intermediate_size: feed-forward width; null = the target's.

    Raises:
        ConfigError: a size below one.
    """

    autoregressive = True
    confidence_head = None
    num_layers = 1

    def __init__(
        self, facts: TargetFacts, frozen: FrozenHead, block_size: int, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        check_positive(block_size=block_size)
        self.block_size = block_size
        self.geometry = geometry = Geometry.of(facts, intermediate_size)
        self._frozen = (frozen,)
        self.fc = nn.Linear(geometry.num_taps * geometry.hidden_size, geometry.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(geometry)])
        self.norm = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.rotary = geometry.rotary()
        initialise(self)

    @property
    def frozen(self) -> FrozenHead:
        return self._frozen[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def layer(self) -> Eagle3Layer:
        return self.layers[0]  # type: ignore[return-value]

    def head_parameters(self) -> list[nn.Parameter]:
        """None: there is no sequential head."""
        return []

    def layers_alone(self) -> list[nn.Module]:
        """None: the one layer is run again for every step."""
        return []

    def compile_training(self) -> None:
        """Compile the training pass; names of parameters stay as they are, decoding is not touched."""
        self._steps = torch.compile(self._steps, dynamic=True)  # type: ignore[method-assign]

    def forward(self, features: TargetFeatures, horizon: int, needed_NS: Tensor | None = None) -> list[Tensor]:
        """Training-time test: hidden states [N, S, d] of each of ``horizon`` steps, before the final norm.

        Only the positions of ``needed_NS`` are computed (None: all but padding); the others' hidden states are zero.
        No position reads another's later steps, so prompts cost keys and values of step 0 and nothing else.
        """
        ids = features.input_ids
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        inside = columns < (ids.shape[1] if features.lengths is None else features.lengths[:, None])
        context = Index.of(inside)
        needed = inside if needed_NS is None else inside & needed_NS
        needed[0, 0] |= ~needed.any()  # a rank with nothing to train runs the same layers
        rows = Index.of(needed)
        chosen = rows.pack(context.unpack(torch.arange(len(context.padded), device=ids.device)))
        taps = context.pack(features.taps).to(self.dtype)
        steps = self._steps(taps, ids, (context, rows, chosen), context.pack(columns), horizon)
        return [rows.unpack(hidden) for hidden in steps]

    def _steps(
        self, taps_TE: Tensor, ids: Tensor, indices: tuple[Index, Index, Tensor], positions: Tensor, horizon: int
    ) -> list[Tensor]:
        """Step 0 over the context, whose ``chosen`` rows go on; they alone are queries and take later steps."""
        context, rows, chosen = indices
        attention = self.layer.self_attn
        hidden = self.fc(taps_TE)
        ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        mixed = self._mix(context.pack(ids), hidden)
        keys, values = (context.to_grid(part) for part in attention.key_value(mixed, self.rotary(positions)))
        hidden, mixed, positions = hidden[chosen], mixed[chosen], positions[chosen]
        hides = torch.arange(context.used, device=ids.device) > rows.to_grid(positions)[..., None]
        later: list[tuple[Tensor, Tensor]] = []
        steps = []
        for step in range(horizon):
            rotation = self.rotary(positions + step)
            if step > 0:
                ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
                mixed = self._mix(rows.pack(ids), hidden)
                key, value = attention.key_value(mixed, rotation)
                later.append((rows.to_grid(key), rows.to_grid(value)))
            query = rows.to_grid(attention.query(mixed, rotation))
            attended = rows.from_grid(self._attend(query, keys, values, later, hides))
            hidden = self.layer.finish(hidden, attended)
            steps.append(hidden)
        return steps

    def _mix(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [..., 2d] from tokens [...] and hidden states [..., d]."""
        return self.layer.mix(self.frozen.embedding(ids).to(self.dtype), hidden)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, later: list[tuple[Tensor, Tensor]], hides: Tensor
    ) -> Tensor:
        """Causal over step 0, own position only over later steps: S + j scores per query, no mask over all steps.

        Shapes: query [N, Q, H, D]; keys and values of step 0 [N, S, K, D], of later steps [N, Q, K, D] each;
        hides [N, Q, S], true where a query must not look.
        """
        n, q, h, d = query.shape
        s, k = keys.shape[1:3]
        grouped = query.view(n, q, k, h // k, d)
        scale = self.layer.self_attn.scale
        scores = torch.einsum("nqkgd,ntkd->nkgqt", grouped, keys) * scale
        scores = scores.masked_fill(hides[:, None, None], float("-inf"))
        if not later:
            weights = scores.float().softmax(-1).to(query.dtype)
            return torch.einsum("nkgqt,ntkd->nqkgd", weights, values).reshape(n, q, h, d)
        own_keys, own_values = (torch.stack(parts, 3) for parts in zip(*later, strict=True))  # [N, Q, K, j, D]
        own = torch.einsum("nqkgd,nqkjd->nkgqj", grouped, own_keys) * scale
        weights = torch.cat([scores, own], -1).float().softmax(-1).to(query.dtype)
        out = torch.einsum("nkgqt,ntkd->nqkgd", weights[..., :s], values)
        out = out + torch.einsum("nkgqj,nqkjd->nqkgd", weights[..., s:], own_values)
        return out.reshape(n, q, h, d)

    # decoding

    def cache_geometry(self) -> tuple[int, int, int]:
        """Layers, key/value heads and head width of the key/value rows this drafter writes."""
        return 1, self.geometry.num_kv_heads, self.geometry.head_dim

    def extend(
        self, store: KVStore, rows: list[int], starts: list[int], counts: list[int], taps_BE: Tensor, next_B: Tensor
    ) -> Tensor:
        """Take in features at start .. start+count-1 of each row, each paired with the token after it.

        Returns:
            The hidden state [R, d] of each row's last token, which predicts the first token of the next proposal.
        """
        plan = store.causal_pass(rows, starts, counts)
        hidden = self._decode_step(next_B, self.fc(taps_BE.to(self.fc.weight.dtype)), plan)
        return hidden[torch.tensor(counts, device=hidden.device).cumsum(0) - 1]

    def propose(
        self,
        store: KVStore,
        rows: list[int],
        anchors: list[int],
        anchor_ids: Tensor,
        carry: Tensor,
        sampler: Sampler,
        uniform: Tensor,
    ) -> Proposal:
        """Draft ``block_size`` tokens per row, one layer pass a token; ``carry`` is what ``extend`` returned."""
        hidden = carry
        drawn: list[Tensor] = []
        distributions: list[Tensor] = []
        for slot in range(self.block_size):
            if slot > 0:
                plan = store.causal_pass(rows, [anchor + slot - 1 for anchor in anchors], [1] * len(rows))
                hidden = self._decode_step(drawn[-1], hidden, plan)
            token, distribution = sampler.sample(self.frozen.logits(self.norm(hidden)), uniform[:, slot])
            drawn.append(token)
            distributions += [] if distribution is None else [distribution]
        return Proposal(torch.stack(drawn, 1), torch.stack(distributions, 1) if distributions else None, None)

    def _decode_step(self, ids_B: Tensor, hidden_Bd: Tensor, plan: KVPass) -> Tensor:
        layer = self.layer
        mixed = self._mix(ids_B, hidden_Bd)
        rotation = self.rotary(plan.position_B)
        keys, values = layer.self_attn.key_value(mixed, rotation)
        attended = plan.attend(0, layer.self_attn.query(mixed, rotation), keys, values, layer.self_attn.scale)
        return layer.finish(hidden_Bd, attended.to(hidden_Bd.dtype))
