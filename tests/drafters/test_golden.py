"""Logits, losses, gradients and generations against tensors of an independent implementation (../shared/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_exp.contracts import TargetFacts, TargetFeatures
from dspark_exp.data.anchors import blocks_at
from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.drafters import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from dspark_exp.objectives import BlockObjective
from dspark_exp.targets import Target
from dspark_exp.targets.ragged import RAGGED
from tests.conftest import make_cache

BLOCK_KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn")
_BACKBONE = ("fc.", "hidden_norm.", "norm.", "layers.")


@pytest.fixture(scope="module")
def golden_target(golden: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(golden / "target", dtype=torch.float32, attn_implementation=RAGGED)
    config = model.config
    facts = TargetFacts(
        "golden", "qwen3", config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, config.intermediate_size, config.rms_norm_eps,
        dict(config.rope_parameters), config.max_position_embeddings, config.vocab_size, config.vocab_size,
        (0, 1, 2), 319, 0, (2,),
    )  # fmt: skip
    return Target(model, None, facts, "golden")


def _load(golden: Path, kind: str, target: Target) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = json.loads((golden / kind / "config.json").read_text())
    if kind == "eagle3":
        drafter: torch.nn.Module = Eagle3Drafter(target.facts, target.head, config["ttt_length"])
    elif kind == "dflash":
        drafter = DFlashDrafter(target.facts, target.head, config["num_hidden_layers"], config["block_size"])
    else:
        head = {"vanilla": "markov"}.get(config["markov_head_type"], config["markov_head_type"])
        drafter = DSparkDrafter(
            target.facts, target.head, config["num_hidden_layers"], config["block_size"], head=head,
            head_rank=config["markov_rank"], confidence_head=True,
        )  # fmt: skip
    weights = load_file(golden / kind / "model.safetensors")
    for name in ("embed_tokens", "lm_head"):
        own = target.head.embedding if name == "embed_tokens" else target.head.lm_head
        torch.testing.assert_close(weights.pop(f"{name}.weight"), own.weight, atol=0, rtol=0)
    drafter.load_state_dict({_ours(name, kind): tensor for name, tensor in weights.items()}, strict=True)
    return drafter, load_file(golden / kind / "io.safetensors")


def _ours(name: str, kind: str) -> str:
    return f"backbone.{name}" if kind != "eagle3" and name.startswith(_BACKBONE) else name


def _batch(io: dict[str, torch.Tensor]) -> TargetFeatures:
    return TargetFeatures(
        io["input_ids"].long(),
        io["loss_mask"].bool(),
        io["target_hidden_states"],
        io["target_last_hidden_states"],
    )


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_logits_losses_and_gradients_equal_the_reference(golden: Path, golden_target: Target, kind: str) -> None:
    drafter, io = _load(golden, kind, golden_target)
    features = _batch(io)
    keep = io["block_keep_mask"].bool()
    blocks = blocks_at(features.input_ids, features.supervised, io["anchor_positions"].long(), keep, 7)
    live = io["eval_mask"].bool()
    assert torch.equal(blocks.live, live)
    assert torch.equal(blocks.labels[live], io["target_ids"].long()[live])
    output = drafter(features, blocks)
    logits = golden_target.head.lm_head(output.hidden)
    if output.bias_features is not None:
        logits = logits + output.bias_features @ output.bias_weight.T
    torch.testing.assert_close(logits[keep], io["draft_logits"][keep], atol=2e-5, rtol=1e-5)
    if output.confidence_logits is not None:
        torch.testing.assert_close(output.confidence_logits[keep], io["confidence_logits"][keep], atol=1e-5, rtol=1e-5)
    objective = BlockObjective(1.0, 0.0, 0.0) if kind == "dflash" else BlockObjective(0.1, 0.9, 1.0)
    result = objective(output, blocks, features, drafter.frozen, 1.0, lambda value: value)
    for name in ("ce", "l1", "confidence"):
        if float(io.get(f"term.{name}_loss_den", torch.zeros(1))) > 0:
            mean = io[f"term.{name}_loss_num"] / io[f"term.{name}_loss_den"]
            torch.testing.assert_close(result.terms[name].reshape(1), mean, atol=0, rtol=1e-5)
    torch.testing.assert_close(result.loss.reshape(1), io["loss"], atol=0, rtol=1e-5)
    result.loss.backward()
    gradients = dict(drafter.named_parameters())
    compared = 0
    for name, wanted in io.items():
        if name.startswith("grad.") and not name.startswith(("grad.embed_tokens", "grad.lm_head")):
            found = gradients[_ours(name.removeprefix("grad."), kind)].grad
            torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_greedy_block_equals_the_reference(golden: Path, golden_target: Target, kind: str) -> None:
    drafter, io = _load(golden, kind, golden_target)
    layers, kv_heads, head_dim = drafter.cache_geometry()
    store = make_cache(layers, 1, kv_heads, 64, head_dim)
    ids, length = io["input_ids"][0].long(), int(io["block.context_length"])
    drafter.extend(store, [0], [0], [length], io["target_hidden_states"][0, :length], ids)
    proposal = drafter.propose(store, [0], [length], ids[length : length + 1], None, Sampling(0.0), torch.rand(1, 7))
    assert proposal.tokens.tolist() == io["block.tokens"].tolist()
    if proposal.confidence is not None:
        wanted = io["block.confidence_logits"].sigmoid()
        torch.testing.assert_close(proposal.confidence, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_greedy_generation_equals_the_reference(golden: Path, golden_target: Target, kind: str) -> None:
    drafter, io = _load(golden, kind, golden_target)
    output_ids = io["generate.output_ids"][0].tolist()
    loop = SpeculativeLoop(golden_target, drafter, make_cache, Sampling(0.0))
    (generation,) = loop.run([Request(output_ids[:20], 24, seed=0)])
    assert generation.token_ids == output_ids[20 : 20 + len(generation.token_ids)]
    emitted = [r.emitted for r in generation.rounds]
    wanted = io["generate.acceptance_lengths"].tolist()
    assert emitted[:-1] == wanted[: len(emitted) - 1]
    assert len(wanted) - len(emitted) in (0, 1)  # the reference counts tokens without the prefill's
    assert emitted[-1] <= wanted[len(emitted) - 1]  # the reference's last round may pass the token limit


def test_eagle3_steps_equal_the_reference(golden: Path, golden_target: Target) -> None:
    drafter, io = _load(golden, "eagle3", golden_target)
    features = _batch(io)
    for step, hidden in enumerate(drafter(features, 7)):
        logits = golden_target.head.lm_head(drafter.norm(hidden))
        valid = io["input_ids"].shape[1] - 1 - step  # the reference's valid length shrinks by one each step
        torch.testing.assert_close(logits[:, :valid], io["step_logits"][step][:, :valid], atol=5e-5, rtol=1e-4)
