"""The tiles of the flex backend: equal to the padded attention, and none is visited that no query needs."""

from __future__ import annotations

import pytest
import torch

from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.errors import ConfigError
from dspark_exp.targets import RaggedKVCache
from dspark_exp.targets.ragged_flex import TILE
from tests.conftest import make_drafter, random_target


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("kind", ["causal", "block"])
def test_flex_equals_padded_attention_over_many_tiles(kind: str, window: int | None) -> None:
    rows, starts, counts = [3, 0, 2], [150, 3, 290], [7, 100, 60] if kind == "causal" else [40, 40, 40]
    generator = torch.Generator().manual_seed(0)
    outputs = []
    tokens = sum(counts)
    stored = torch.randn(2, 4, 2, 400, 16, generator=generator)
    query = torch.randn(tokens, 6, 16, generator=generator)
    key, value = torch.randn(2, tokens, 2, 16, generator=generator)
    for backend in ("sdpa", "flex"):
        cache = RaggedKVCache([(2, 16)], 4, 400, torch.float32, torch.device("cpu"), backend)
        cache.keys[0][:, :, :400], cache.values[0][:, :, :400] = stored
        plan = cache.causal_pass(rows, starts, counts) if kind == "causal" else cache.block_pass(rows, starts, 40)
        outputs.append(plan.attend(0, query, key, value, 0.25, window))
    torch.testing.assert_close(*outputs, atol=2e-6, rtol=1e-5)


def test_tiles_follow_the_tokens_and_not_the_longest_row() -> None:
    cache = RaggedKVCache([(1, 16)], 64, 4096, torch.float32, torch.device("cpu"), "flex")
    rows = list(range(64))
    starts = [4000 if row == 5 else 100 for row in rows]
    plan = cache.causal_pass(rows, starts, [8] * 64)
    mask = plan.tiles_of(None)
    visited = int(mask.kv_num_blocks.sum())
    assert visited == 63 * 1 + -(-4008 // TILE)
    assert visited < 0.1 * 64 * 4096 / TILE  # what a padded pass reads


@pytest.mark.parametrize("kind", [None, "dspark_markov", "eagle3"])
def test_decoding_with_flex_gives_the_same_tokens(kind: str | None) -> None:
    results = []
    for backend in ("sdpa", "flex"):
        target = random_target("gemma3")
        target.attention = backend

        def make_cache(layers: int, rows: int, heads: int, length: int, width: int, name=backend) -> RaggedKVCache:
            return RaggedKVCache([(heads, width)] * layers, rows, length, torch.float32, torch.device("cpu"), name)

        drafter = None if kind is None else make_drafter(kind, target)
        loop = SpeculativeLoop(target, drafter, make_cache, Sampling(1.0), batch_size=2)
        requests = [Request([3 + i, 4, 5][: 1 + i % 3], 9, seed=i) for i in range(5)]
        results.append([g.token_ids for g in loop.run(requests)])
    assert results[0] == results[1]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.attention"):
        RaggedKVCache([(1, 2)], 1, 8, torch.float32, torch.device("cpu"), "flash")
