"""One tiny world used everywhere: a random target with a vocabulary small enough to enumerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen3Config,
)

from dspark_exp.__main__ import CONF
from dspark_exp.drafters import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from dspark_exp.targets import RaggedKVCache, Target, VocabSpec, load_target, target_of
from dspark_exp.targets.ragged import RAGGED

SHARED = Path(__file__).parents[2] / "shared"
BLOCK_SIZE = 4


def random_model(family: str, vocab_size: int = 12, attention: str = RAGGED) -> Any:
    """A 4-layer random model whose distributions are far from uniform; the same weights for every attention."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.35,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": None,
        "bos_token_id": None,
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    gemma = {
        "sliding_window": 5,  # short, so that it matters within a few tokens
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
    }
    if family == "qwen3":
        config: Any = Qwen3Config(**sizes, **rope)
    elif family == "llama":
        config = LlamaConfig(**sizes, **rope)
    elif family == "gemma3":
        config = Gemma3TextConfig(**sizes, **gemma, query_pre_attn_scalar=8)
    else:
        own = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "pad_token_id": 1}
        text = Gemma4TextConfig(**sizes | gemma | own, hidden_size_per_layer_input=0)
        config = Gemma4Config(text_config=text)
        config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.35)
    return model.eval()


def random_target(family: str = "qwen3", vocab_size: int = 12, stop_ids: tuple[int, ...] = (0,)) -> Target:
    """A random model as a target, without a tokenizer."""
    vocabulary = VocabSpec(vocab_size, vocab_size, vocab_size, mask_id=vocab_size - 1, pad_id=1, stop_ids=stop_ids)
    model = random_model(family, vocab_size)
    return target_of("random", model, None, layer_ids=(0, 1, 2), vocabulary=vocabulary, revision="random")


def target_from_folder(folder: Path, layer_ids: tuple[int, ...], mask_token_id: int) -> Target:
    """A checkpoint without a tokenizer as a target."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=RAGGED)
    rows, stop = model.config.vocab_size, model.config.eos_token_id
    stop_ids = (257, 258) if rows == 512 else (stop,)  # meta.json of the trained set
    vocabulary = VocabSpec(rows, rows, rows, mask_id=mask_token_id, pad_id=0, stop_ids=stop_ids)
    return target_of("golden", model, None, layer_ids=layer_ids, vocabulary=vocabulary, revision="golden")


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
    return RaggedKVCache([(kv_heads, head_dim)] * layers, rows, max_length, torch.float32, torch.device("cpu"))


def composed(*overrides: str) -> DictConfig:
    """The config as the command line composes it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


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
