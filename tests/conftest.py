"""One tiny world used everywhere: a random target with a vocabulary small enough to enumerate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspark_exp.contracts import TargetFacts
from dspark_exp.drafters import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from dspark_exp.targets import RaggedKVCache, Target, load_target
from dspark_exp.targets.ragged import RAGGED

SHARED = Path(__file__).parents[2] / "shared"
BLOCK_SIZE = 4


def random_target(family: str = "qwen3", vocab_size: int = 12, stop_ids: tuple[int, ...] = (0,)) -> Target:
    """A 4-layer random model whose distributions are far from uniform."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "initializer_range": 0.35,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attn_implementation": RAGGED,
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    facts = TargetFacts(
        name="random",
        family=family,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=model.config.rms_norm_eps,
        rope_parameters=dict(model.config.rope_parameters),
        max_position_embeddings=256,
        vocab_size=vocab_size,
        num_usable_tokens=vocab_size,
        layer_ids=(0, 1, 2),
        mask_token_id=vocab_size - 1,
        pad_token_id=1,
        stop_ids=stop_ids,
    )
    return Target(model, None, facts, revision="random")


def target_from_folder(folder: Path, layer_ids: tuple[int, ...], mask_token_id: int) -> Target:
    """A checkpoint without a tokenizer as a target."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=RAGGED)
    config = model.config
    stop = config.eos_token_id
    facts = TargetFacts(
        name="golden",
        family=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        num_usable_tokens=config.vocab_size,
        layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        pad_token_id=0,
        stop_ids=(stop,) if isinstance(stop, int) else tuple(stop),
    )
    if config.vocab_size == 512:
        facts = replace(facts, stop_ids=(257, 258))  # meta.json of the trained set
    return Target(model, None, facts, "golden")


def make_drafter(kind: str, target: Target, block_size: int = BLOCK_SIZE, seed: int = 3) -> torch.nn.Module:
    """An untrained drafter by config name, with every parameter randomised so that no term is trivially zero."""
    torch.manual_seed(seed)
    facts, head = target.facts, target.head
    if kind == "eagle3":
        drafter: torch.nn.Module = Eagle3Drafter(facts, head, block_size)
    elif kind == "dflash":
        drafter = DFlashDrafter(facts, head, 2, block_size)
    else:
        drafter = DSparkDrafter(
            facts, head, 2, block_size, head=kind.removeprefix("dspark_"), head_rank=6, confidence_head=True
        )
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def make_cache(layers: int, rows: int, kv_heads: int, max_length: int, head_dim: int) -> RaggedKVCache:
    """Key/value rows for a drafter on the CPU."""
    return RaggedKVCache(layers, rows, kv_heads, max_length, head_dim, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def target() -> Target:
    return random_target()


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The embedded target."""
    return load_target("tiny", "embedded", num_feature_layers=3)


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip("needs ../shared/golden, which is not beside this checkout")
    return folder
