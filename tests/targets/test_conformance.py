"""Every family gives plain Transformers' numbers: features, logits, ragged decoding (DESIGN section 6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, MambaConfig

from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.errors import ConfigError, TargetError
from dspark_exp.targets import VocabSpec, check_target, turn_end_id
from dspark_exp.targets.families import FAMILIES, read_architecture
from dspark_exp.targets.vocabulary import stop_ids_of
from tests.conftest import make_cache, make_drafter, random_model, random_target

LENGTHS = (5, 17, 9, 12)


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 12, (n,), generator=generator) for n in LENGTHS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_logits_equal_plain_transformers(family: str, side: str) -> None:
    target, plain = random_target(family), random_model(family, attention="eager")
    sequences = _sequences()
    for chosen in ([1], [0, 1, 2, 3], [0, 1, 2, 3]):  # batch 1, batch 4, the same call again
        width = max(LENGTHS[i] for i in chosen)
        ids = torch.ones(len(chosen), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        spans = {}
        for row, i in enumerate(chosen):
            first = width - LENGTHS[i] if side == "left" else 0
            spans[row] = slice(first, first + LENGTHS[i])
            ids[row, spans[row]], mask[row, spans[row]] = sequences[i], 1
        taps, final = target.features(ids, mask)
        for row, i in enumerate(chosen):
            with torch.no_grad():
                out = plain(sequences[i][None], output_hidden_states=True)
            wanted = torch.cat([out.hidden_states[layer + 1] for layer in target.facts.layer_ids], dim=-1)
            torch.testing.assert_close(taps[row, spans[row]], wanted[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(target.logits(final[row, spans[row]]), out.logits[0], atol=1e-4, rtol=1e-4)
            assert wanted.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedding_is_a_tap_like_any_other(family: str) -> None:
    plain = random_model(family, attention="eager")
    target = random_target(family)
    ids = _sequences()[0][None]
    with torch.no_grad():
        wanted = plain(ids, output_hidden_states=True).hidden_states[0]
        torch.testing.assert_close(target.head.embedding(ids), wanted, atol=1e-5, rtol=1e-5)  # its scale included


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", [None, "dspark_markov", "eagle3"])
def test_ragged_greedy_decoding_equals_generate(family: str, drafter: str | None) -> None:
    target = random_target(family, stop_ids=(0,))
    plain = random_model(family, attention="eager")
    prompts = [s.clamp(min=1).tolist() for s in _sequences()]
    network = None if drafter is None else make_drafter(drafter, target)
    loop = SpeculativeLoop(target, network, make_cache, Sampling(0.0, 0, 1.0), batch_size=3)
    generations = loop.run([Request(ids, 12, seed=i) for i, ids in enumerate(prompts)])
    for prompt, generation in zip(prompts, generations, strict=True):
        wanted = plain.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert generation.token_ids == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_passes_a_right_target_and_names_a_wrong_layer(family: str) -> None:
    target = random_target(family)
    check_target(target)
    right = target._taken

    def wrong() -> Tensor:
        taps = right()
        taps[..., 32:64] = 0  # what a capture that forgets a layer gives
        return taps

    target._taken = wrong  # type: ignore[method-assign]
    with pytest.raises(TargetError, match=r"the output of layer 1 differs.*cosine"):
        check_target(target)


def test_gemma4_facts_come_from_its_nested_config() -> None:
    facts = random_target("gemma4").facts
    assert facts.layer_kv == ((2, 8), (1, 16), (2, 8), (1, 16))
    assert (facts.num_kv_heads, facts.head_dim) == (1, 16)  # of full-attention layers: what drafters take
    assert (facts.body, facts.keys_are_values, facts.logit_softcap) == ("gemma4", True, 3.0)
    architecture = read_architecture(random_model("gemma4").config)
    assert architecture.layer_windows == (5, None, 5, None)
    assert architecture.rope_parameters["rope_type"] == "proportional"


def test_an_unknown_family_is_refused_with_what_is_missing() -> None:
    with pytest.raises(TargetError, match=r"'mamba' is not supported.*embedding scale.*does not say.*rope_parameters"):
        read_architecture(MambaConfig())


def test_a_variant_with_other_maths_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=2)
    config.attn_logit_softcapping = 50.0
    with pytest.raises(TargetError, match="attn_logit_softcapping"):
        read_architecture(config)
    config.attn_logit_softcapping, config.use_bidirectional_attention = None, True
    with pytest.raises(TargetError, match="both directions"):
        read_architecture(config)


def test_vocabulary_facts_are_checked_in_one_place() -> None:
    good = {"tokenizer_size": 10, "embedding_rows": 12, "head_rows": 12, "mask_id": 10, "pad_id": 1, "stop_ids": (2,)}
    assert VocabSpec(**good).num_usable == 10
    assert VocabSpec(**good | {"tokenizer_size": 20}).num_usable == 12
    for change, error, message in (
        ({"head_rows": 11}, TargetError, "embedding has 12 rows, its LM head 11"),
        ({"stop_ids": ()}, TargetError, "no end token"),
        ({"mask_id": 12}, ConfigError, "12 embedding rows"),
        ({"mask_id": 2}, ConfigError, "end token"),
        ({"mask_id": 1}, ConfigError, "pad token"),
        ({"bos_id": 10}, ConfigError, "beginning-of-text token"),
    ):
        with pytest.raises(error, match=message):
            VocabSpec(**good | change)


def test_the_turn_end_of_the_template_is_a_stop_token(tiny, tmp_path: Path) -> None:
    assert turn_end_id(tiny.tokenizer) == tiny.tokenizer.eos_token_id


def test_stop_tokens_are_the_union_of_everything_that_declares_one(tiny) -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=1, eos_token_id=50)
    generation = GenerationConfig(eos_token_id=[1, 106])
    assert set(stop_ids_of(tiny.tokenizer, config, generation)) == {1, 50, 106, tiny.tokenizer.eos_token_id}
    assert stop_ids_of(tiny.tokenizer, tiny.model.config, None) == tiny.facts.stop_ids
