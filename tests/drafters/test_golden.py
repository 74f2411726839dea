"""Logits, losses, gradients and generations against tensors of an independent implementation (../shared/golden).

Two sets: random weights (``<kind>/``) and weights trained for a while (``trained/<kind>/``). Both are read through
``interop.deepspec``, so that reading a released checkpoint is what is tested.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dspark_exp.contracts import TargetFeatures
from dspark_exp.data.anchors import blocks_at
from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.interop import read_config, read_drafter
from dspark_exp.objectives import BlockObjective, TrainingTimeTestObjective
from dspark_exp.targets import Target
from tests.conftest import make_cache, target_from_folder

RANDOM = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn")
TRAINED = ("dflash", "dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_vanilla_plainconf")
BLOCK_SETS = [*RANDOM, *(f"trained/{kind}" for kind in TRAINED)]
EAGLE_SETS = ["eagle3", "trained/eagle3"]


def _load(golden: Path, name: str) -> tuple[nn.Module, dict[str, Tensor], Target]:
    config = read_config(golden / name)
    folder = golden / ("trained/target" if name.startswith("trained") else "target")
    mask = config.mask_token_id if config.mask_token_id is not None else 300
    target = target_from_folder(folder, config.layer_ids, mask)
    io = load_file(golden / name / "io.safetensors")
    return read_drafter(golden / name, target), io, target


def _features(io: dict[str, Tensor]) -> TargetFeatures:
    ids, marks = io["input_ids"].long(), io["loss_mask"].bool()
    lengths = io["attention_mask"].sum(1) if "attention_mask" in io else None
    return TargetFeatures(ids, marks, io["target_hidden_states"], io["target_last_hidden_states"], lengths)


def _objective(folder: Path) -> BlockObjective:
    meta = folder / "meta.json"
    if not meta.exists():
        return BlockObjective(1.0, 0.0, 0.0) if folder.name == "dflash" else BlockObjective(0.1, 0.9, 1.0)
    given = json.loads(meta.read_text())["loss_args"]
    return BlockObjective(
        given["ce_loss_alpha"], given["l1_loss_alpha"], given["confidence_head_alpha"], given["loss_decay_gamma"]
    )


def _assert_gradients(drafter: nn.Module, io: dict[str, Tensor]) -> int:
    found = {name.removeprefix("backbone."): p.grad for name, p in drafter.named_parameters()}
    stored = {n.removeprefix("grad."): g for n, g in io.items() if n.startswith("grad.")}
    stored = {n: g for n, g in stored.items() if not n.startswith(("embed_tokens", "lm_head"))}
    for name, wanted in stored.items():
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found[name], wanted, atol=1e-4 * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    return len(stored)


@pytest.mark.parametrize("name", BLOCK_SETS)
def test_logits_losses_and_gradients_equal_the_reference(golden: Path, name: str) -> None:
    drafter, io, target = _load(golden, name)
    features, keep = _features(io), io["block_keep_mask"].bool()
    anchors = io["anchor_positions"].long()
    blocks = blocks_at(features.input_ids, features.supervised, anchors, keep, drafter.block_size)
    live = io["eval_mask"].bool()
    assert torch.equal(blocks.live, live)
    assert torch.equal(blocks.labels[live], io["target_ids"].long()[live])
    output = drafter(features, blocks)
    logits = target.head.lm_head(output.hidden)
    if output.bias_features is not None:
        logits = logits + output.bias_features @ output.bias_weight.T
    torch.testing.assert_close(logits[keep], io["draft_logits"][keep], atol=1e-5, rtol=1e-5)
    if output.confidence_logits is not None:
        torch.testing.assert_close(output.confidence_logits[keep], io["confidence_logits"][keep], atol=1e-5, rtol=1e-5)
    objective = _objective(golden / name)
    result = objective(output, blocks, features, drafter.frozen, 1.0, lambda value: value)
    for term in ("ce", "l1", "confidence"):
        if float(io.get(f"term.{term}_loss_den", torch.zeros(1)).sum()) > 0:
            mean = io[f"term.{term}_loss_num"] / io[f"term.{term}_loss_den"]
            torch.testing.assert_close(result.terms[term].reshape(1), mean.reshape(1), atol=0, rtol=1e-5)
    torch.testing.assert_close(result.loss.reshape(1), io["loss"].reshape(1), atol=0, rtol=1e-5)
    result.loss.backward()
    assert _assert_gradients(drafter, io) >= 5


@pytest.mark.parametrize("name", RANDOM)
def test_a_greedy_block_equals_the_reference(golden: Path, name: str) -> None:
    drafter, io, _ = _load(golden, name)
    layers, kv_heads, head_dim = drafter.cache_geometry()
    store = make_cache(layers, 1, kv_heads, 64, head_dim)
    ids, length = io["input_ids"][0].long(), int(io["block.context_length"])
    drafter.extend(store, [0], [0], [length], io["target_hidden_states"][0, :length], ids)
    proposal = drafter.propose(store, [0], [length], ids[length : length + 1], None, Sampling(0.0), torch.rand(1, 7))
    assert proposal.tokens.tolist() == io["block.tokens"].tolist()
    if proposal.confidence is not None:
        wanted = io["block.confidence_logits"].sigmoid()
        torch.testing.assert_close(proposal.confidence, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", RANDOM)
def test_a_greedy_generation_equals_the_reference(golden: Path, name: str) -> None:
    drafter, io, target = _load(golden, name)
    output_ids = io["generate.output_ids"][0].tolist()
    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(0.0))
    (generation,) = loop.run([Request(output_ids[:20], 24, seed=0)])
    assert generation.token_ids == output_ids[20 : 20 + len(generation.token_ids)]
    emitted = [r.emitted for r in generation.rounds]
    wanted = io["generate.acceptance_lengths"].tolist()
    assert emitted[:-1] == wanted[: len(emitted) - 1]
    assert len(wanted) - len(emitted) in (0, 1)  # the reference counts tokens without the prefill's
    assert emitted[-1] <= wanted[len(emitted) - 1]  # the reference's last round may pass the token limit


@pytest.mark.parametrize("name", [*(f"trained/{kind}" for kind in TRAINED), "trained/eagle3"])
def test_greedy_generations_of_trained_drafters_equal_the_reference(golden: Path, name: str) -> None:
    drafter, io, target = _load(golden, name)
    for index in range(2):
        prompt, output = io[f"gen.{index}.prompt"][0].tolist(), io[f"gen.{index}.output_ids"][0].tolist()
        loop = SpeculativeLoop(target, drafter, make_cache, Sampling(0.0))
        (generation,) = loop.run([Request(prompt, 32, seed=0)])
        count = min(len(generation.token_ids), len(output) - len(prompt))
        assert generation.token_ids[:count] == output[len(prompt) : len(prompt) + count]
        emitted, wanted = [r.emitted for r in generation.rounds], io[f"gen.{index}.acceptance_lengths"].tolist()
        assert max(wanted) > 1  # something was accepted: the drafter is exercised
        assert emitted[:-1] == wanted[: len(emitted) - 1]
        assert len(wanted) - len(emitted) in (0, 1)


@pytest.mark.parametrize("name", EAGLE_SETS)
def test_eagle3_steps_loss_and_gradients_equal_the_reference(golden: Path, name: str) -> None:
    drafter, io, target = _load(golden, name)
    features = _features(io)
    steps = drafter(features, drafter.block_size)
    if "step_logits" in io:
        for step, hidden in enumerate(steps):
            logits = target.head.lm_head(drafter.norm(hidden))
            valid = io["input_ids"].shape[1] - 1 - step  # the reference's valid length shrinks by one each step
            torch.testing.assert_close(logits[:, :valid], io["step_logits"][step][:, :valid], atol=1e-5, rtol=1e-4)
    objective = TrainingTimeTestObjective(step_decay=0.8, convention="released")
    result = objective([drafter.norm(h) for h in steps], features, drafter.frozen, lambda value: value)
    torch.testing.assert_close(result.loss.reshape(1), io["loss"].reshape(1), atol=0, rtol=1e-5)
    result.loss.backward()
    assert _assert_gradients(drafter, io) >= 5
