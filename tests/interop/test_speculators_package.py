"""Exports for ``speculators`` loaded by that package itself. It needs an environment of its own: ``make interop``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark_exp.interop import draft_greedily, export_drafter
from dspark_exp.targets import Target
from tests.conftest import make_drafter, random_model, target_from_folder

pytest.importorskip("speculators", reason="the speculators package is not installed here; run `make interop`")

CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target on disk: the package loads its embedding and LM head from there."""
    folder = tmp_path_factory.mktemp("target")
    model = random_model("qwen3", vocab_size=40)
    model.config.eos_token_id = 0
    model.save_pretrained(folder)
    return target_from_folder(folder, (0, 1, 2), mask_token_id=39)


def _loaded(folder: Path):
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    if config.speculators_model_type == "eagle3":  # its loader cannot give a report
        return SpeculatorModel.from_pretrained(folder, config=config).eval().float()
    model, report = SpeculatorModel.from_pretrained(folder, config=config, output_loading_info=True)
    assert not report["unexpected_keys"]
    # what the package always takes from the target; anything else missing would be random, without an error
    assert {name.split(".")[0] for name in report["missing_keys"]} <= {"verifier_lm_head", "verifier_norm"}
    model.load_verifier_weights()
    return model.eval().float()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dspark_markov", "dspark_gated", "dspark_rnn"])
def test_the_package_drafts_the_same_block(target: Target, tmp_path: Path, kind: str) -> None:
    drafter = make_drafter(kind, target)
    export_drafter(drafter, target, tmp_path / "out", reader="speculators", dtype=torch.float32)
    model = _loaded(tmp_path / "out")
    ours = draft_greedily(drafter, target, CONTEXT)
    anchor, gamma = len(CONTEXT) - 1, drafter.block_size
    ids = torch.tensor([[*CONTEXT, *ours.tokens, 0]])
    taps, final = target.features(ids, torch.ones_like(ids))
    only_anchor = torch.zeros_like(ids)
    only_anchor[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(taps, ids, only_anchor, final, torch.zeros_like(ids), max_anchors=1)
    previous = ids[:, anchor : anchor + gamma]
    logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    torch.testing.assert_close(logits[0], ours.logits, atol=1e-4, rtol=1e-4)
    if ours.confidence is not None:
        features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
        torch.testing.assert_close(model.confidence_head(features)[0], ours.confidence, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_the_package_drafts_the_same_eagle3_tokens(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", target)
    export_drafter(drafter, target, tmp_path / "out", reader="speculators", dtype=torch.float32)
    model = _loaded(tmp_path / "out")
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    ours = draft_greedily(drafter, target, CONTEXT)
    ids = torch.tensor([[*CONTEXT, *ours.tokens]])
    taps, _ = target.features(ids, torch.ones_like(ids))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1))  # position i pairs state i with token i+1
    model.forward(taps, shifted, torch.zeros_like(ids), ttt_steps=drafter.block_size)
    found = torch.stack([logits[0, len(CONTEXT) - 2] for logits in seen])
    torch.testing.assert_close(found, ours.logits, atol=1e-4, rtol=1e-4)
