"""Drafters of Gemma 4 targets: the released layer style, against Transformers' own modules, block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from dspark_exp.contracts import AnchorBlocks, TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.drafters import BlockDrafter, Eagle3Drafter
from dspark_exp.targets import Target
from tests.conftest import BLOCK_SIZE, make_cache, make_drafter, random_target

KINDS = ("dflash", "dspark_markov", "dspark_rnn")


@pytest.fixture(scope="module")
def gemma() -> Target:
    return random_target("gemma4")


def _batch(target: Target) -> tuple[TargetFeatures, AnchorBlocks]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (2, 20), generator=generator)
    supervised = torch.ones_like(ids, dtype=torch.bool)
    features = TargetFeatures(ids, supervised, *target.features(ids, torch.ones_like(ids)))
    return features, draw_anchors(ids, supervised, 3, BLOCK_SIZE, generator)


def _reference_block(drafter: BlockDrafter, target: Target, taps_SE: Tensor, anchor: int, anchor_id: int) -> Tensor:
    """One block through Transformers' Gemma 4 layers, the context prepended to keys and values by hand."""
    text: Gemma4TextConfig = target.model.config.get_text_config()
    rope = Gemma4TextRotaryEmbedding(text)
    backbone = drafter.backbone
    norm = Gemma4RMSNorm(32, eps=text.rms_norm_eps)
    norm.load_state_dict(backbone.hidden_norm.state_dict())
    context = norm(backbone.fc(taps_SE[:anchor]))[None]
    ids = torch.tensor([[anchor_id] + [target.facts.mask_token_id] * (BLOCK_SIZE - 1)])
    hidden = target.head.embedding(ids)
    positions = torch.arange(anchor + BLOCK_SIZE)[None]
    cos, sin = rope(hidden, positions, "full_attention")
    for layer in backbone.layers:
        ours = Gemma4TextDecoderLayer(text, layer_idx=1)  # a full-attention layer
        ours.load_state_dict(layer.state_dict(), strict=True)
        attention = ours.self_attn
        normed = ours.input_layernorm(hidden)
        both = torch.cat([context, normed], dim=1)
        key = attention.k_proj(both).view(1, -1, 1, 16)
        value = attention.v_norm(key)
        key = apply_rotary_pos_emb(attention.k_norm(key), cos, sin, unsqueeze_dim=2)
        query = attention.q_norm(attention.q_proj(normed).view(1, BLOCK_SIZE, 4, 16))
        query = apply_rotary_pos_emb(query, cos[:, anchor:], sin[:, anchor:], unsqueeze_dim=2)
        scores = torch.einsum("qhd,kd->hqk", query[0], key[0, :, 0])  # Gemma 4 does not scale its scores
        attended = torch.einsum("hqk,kd->qhd", scores.softmax(-1), value[0, :, 0]).reshape(1, BLOCK_SIZE, 64)
        hidden = hidden + ours.post_attention_layernorm(attention.o_proj(attended))
        fed = ours.post_feedforward_layernorm(ours.mlp(ours.pre_feedforward_layernorm(hidden)))
        hidden = (hidden + fed) * ours.layer_scalar
    norm.load_state_dict(backbone.norm.state_dict())
    return norm(hidden)[0]


@torch.no_grad()
def test_blocks_equal_transformers_layers(gemma: Target) -> None:
    drafter = make_drafter("dflash", gemma)
    features, blocks = _batch(gemma)
    hidden = drafter(features, blocks).hidden
    for row in range(2):
        for index, anchor in enumerate(blocks.positions[row].tolist()):
            wanted = _reference_block(drafter, gemma, features.taps[row], anchor, int(blocks.previous[row, index, 0]))
            torch.testing.assert_close(hidden[row, index], wanted, atol=2e-5, rtol=1e-4)


def test_the_layers_hold_the_released_tensors_and_no_others(gemma: Target) -> None:
    names = {n.removeprefix("layers.0.") for n in Eagle3Drafter(gemma.facts, gemma.head, 3).state_dict()}
    assert {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar"} <= names
    assert not any("v_proj" in name for name in names)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_computes_what_training_computes(gemma: Target, kind: str) -> None:
    drafter = make_drafter(kind, gemma)
    features, blocks = _batch(gemma)
    output = drafter(features, blocks)
    anchor = int(blocks.positions[0, 0])
    layers, kv_heads, head_dim = drafter.cache_geometry()
    cache = make_cache(layers, 1, kv_heads, 64, head_dim)
    if anchor:
        plan_rows = ([0], [0], [anchor])
        drafter.extend(cache, *plan_rows, features.taps[0, :anchor], features.input_ids[0, 1 : anchor + 1])
    plan = cache.block_pass([0], [anchor], BLOCK_SIZE)
    block = drafter._embed_block(blocks.previous[:1, 0, 0])
    hidden = drafter.backbone.decode(block.flatten(0, 1), plan)
    torch.testing.assert_close(hidden, output.hidden[0, 0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_drafter_logits_are_capped_before_the_markov_bias(gemma: Target) -> None:
    drafter = make_drafter("dspark_markov", gemma)
    hidden = torch.randn(2, 32) * 50
    capped = gemma.head.logits(hidden)
    assert capped.abs().max() <= 3.0
    raw = gemma.head.lm_head(hidden)
    torch.testing.assert_close(capped, 3.0 * torch.tanh(raw / 3.0))
    assert drafter.frozen.softcap == 3.0
