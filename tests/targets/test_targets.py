"""The adapter gives plain Transformers' numbers, whatever the batch, and refuses what it cannot serve."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_exp.errors import ConfigError, DataError, TargetError
from dspark_exp.targets import Target, default_layer_ids, load_target, resolve_layer_ids
from tests.conftest import make_cache, random_target

EMBEDDED = Path(str(files("dspark_exp").joinpath("assets/tiny_target")))


def test_the_embedded_target_ships_below_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 5_000_000


def test_the_embedded_target_has_learned_its_language() -> None:
    report = json.loads((EMBEDDED / "training_report.json").read_text())
    nats = {domain: row["nats_per_token"] for domain, row in report["domains"].items()}
    assert nats["math"] < nats["code"] < nats["chat"]
    for row in report["domains"].values():
        assert row["nats_per_token"] - row["language_nats_per_token"] < 0.01


def test_features_equal_plain_transformers_for_any_batch(tiny: Target) -> None:
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32, attn_implementation="eager").eval()
    sequences = [list(range(10, 10 + n)) for n in (5, 17, 9, 12)]
    for chosen in ([0], [1], [0, 1, 2, 3], [0, 1, 2, 3]):
        length = max(len(sequences[i]) for i in chosen)
        ids = torch.zeros(len(chosen), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            mask[row, : len(sequences[i])] = 1
        taps, final = tiny.features(ids, mask)
        for row, i in enumerate(chosen):
            count = len(sequences[i])
            with torch.no_grad():
                out = plain(torch.tensor([sequences[i]]), output_hidden_states=True)
            wanted = torch.cat([out.hidden_states[layer + 1] for layer in tiny.facts.layer_ids], dim=-1)
            torch.testing.assert_close(taps[row, :count], wanted[0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(tiny.logits(final[row, :count]), out.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_a_ragged_pass_equals_separate_full_passes(family: str, backend: str) -> None:
    target = random_target(family)
    target.attention = backend
    sequences = [torch.randint(0, 12, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14, 6)]
    cache = target.new_cache(3, 32)
    done = [4, 7, 2]
    target.forward_ragged(
        torch.cat([s[:n] for s, n in zip(sequences, done, strict=True)]), cache.causal_pass([0, 1, 2], [0, 0, 0], done)
    )
    # rows 2 and 0 only, by different amounts, in another order
    rows, counts = [2, 0], [4, 3]
    tokens = torch.cat([sequences[r][done[r] : done[r] + c] for r, c in zip(rows, counts, strict=True)])
    taps, final = target.forward_ragged(tokens, cache.causal_pass(rows, [done[r] for r in rows], counts))
    first = 0
    for row, count in zip(rows, counts, strict=True):
        ids = sequences[row][None, : done[row] + count]
        wanted_taps, wanted_final = target.features(ids, torch.ones_like(ids))
        torch.testing.assert_close(taps[first : first + count], wanted_taps[0, -count:], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(final[first : first + count], wanted_final[0, -count:], atol=2e-5, rtol=1e-4)
        first += count


def test_a_rejected_token_leaves_no_trace_in_the_cache(target: Target) -> None:
    outputs = []
    for wrong in (3, 8):
        cache = target.new_cache(1, 16)
        target.forward_ragged(torch.tensor([2, 5, wrong, wrong]), cache.causal_pass([0], [0], [4]))
        outputs.append(target.forward_ragged(torch.tensor([7, 6]), cache.causal_pass([0], [2], [2]))[1])
    torch.testing.assert_close(*outputs, atol=0, rtol=0)


def test_a_cache_that_is_too_short_says_so() -> None:
    with pytest.raises(DataError, match="needs 9 positions; the cache holds 8"):
        make_cache(1, 1, 2, 8, 4).causal_pass([0], [0], [9])


def test_padded_vocabulary_rows_are_never_drawn(tiny: Target) -> None:
    padded = Target(tiny.model, tiny.tokenizer, tiny.facts, "x")
    object.__setattr__(padded, "facts", type(tiny.facts)(**{**tiny.facts.__dict__, "num_usable_tokens": 1000}))
    logits = padded.logits(torch.randn(3, tiny.facts.hidden_size))
    assert torch.isinf(logits[:, 1000:]).all()
    assert torch.isfinite(logits[:, :1000]).all()


def test_default_layers_are_those_of_the_released_configurations() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(40, 5) == (1, 10, 19, 28, 37)
    assert default_layer_ids(6, 3) == (1, 2, 3)
    assert default_layer_ids(4, 3) == (0, 1, 2)
    for layers in range(2, 60):
        for taps in range(1, layers):
            ids = default_layer_ids(layers, taps)
            assert len(set(ids)) == taps
            assert list(ids) == sorted(ids)
            assert 0 <= ids[0] <= ids[-1] <= layers - 2


@pytest.mark.parametrize("ids", [[5], [2, 1], [1, 1], [-2], []])
def test_impossible_layers_are_refused_with_the_range(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"from -1 \(embeddings\) to 4"):
        resolve_layer_ids(ids, 6, 3)


def test_unreadable_and_unknown_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No target model"):
        load_target("x", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(TargetError, match="gpt2"):
        load_target("x", str(tmp_path))
    with pytest.raises(ConfigError, match="int3"):
        load_target("x", "embedded", dtype="int3")
    with pytest.raises(ConfigError, match="mask_token_id=1"):
        load_target("x", "embedded", num_feature_layers=3, mask_token_id=1)  # 1 is the end token


def test_stop_ids_mask_and_template_of_the_embedded_target(tiny: Target) -> None:
    assert tiny.facts.stop_ids == (tiny.tokenizer.eos_token_id,)
    distinct = {tiny.facts.mask_token_id, tiny.facts.pad_token_id, *tiny.facts.stop_ids}
    assert len(distinct) == 3
    assert "{% generation %}" in tiny.tokenizer.chat_template
