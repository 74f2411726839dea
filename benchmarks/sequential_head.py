"""What the sequential head costs: Markov and RNN loops against the backbone and against verification.

Random weights at SmolLM2 size by default; the paper's figure is 0.2 to 1.3 % of a round at batch 128 on a GPU.

    python benchmarks/sequential_head.py [--device cpu|cuda] [--scale smollm2|qwen3_4b] [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspark_exp.decoding import Sampling
from dspark_exp.drafters import DSparkDrafter
from dspark_exp.targets import RaggedKVCache, Target, VocabSpec, target_of
from dspark_exp.targets.ragged import RAGGED
from measure import alternated, report
from train_step import QWEN3_4B, SMOLLM2, Scale

HEADS = ("markov", "rnn")
CONTEXT = 256
TARGET_LAYERS = {"smollm2": 30, "qwen3_4b": 36}


def random_target(scale: Scale, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 of the scale's size with random weights."""
    with torch.device(device):
        config = Qwen3Config(
            vocab_size=scale.vocab, hidden_size=scale.hidden, num_hidden_layers=TARGET_LAYERS[scale.name],
            num_attention_heads=scale.heads, num_key_value_heads=scale.kv_heads, head_dim=scale.head_dim,
            intermediate_size=scale.intermediate, attn_implementation=RAGGED,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(dtype)
    vocabulary = VocabSpec(scale.vocab, scale.vocab, scale.vocab, mask_id=3, pad_id=0, stop_ids=(1,))
    layer_ids = tuple(range(scale.taps))
    return target_of(scale.name, model, None, layer_ids=layer_ids, vocabulary=vocabulary, revision="random")


class Round:
    """The parts of one round of R requests, each callable alone."""

    def __init__(self, target: Target, head: str, scale: Scale, requests: int, gamma: int) -> None:
        facts, device = target.facts, target.device
        self.target, self.requests, self.gamma = target, requests, gamma
        drafter = DSparkDrafter(facts, target.head, scale.layers, gamma, head=head, head_rank=scale.rank)
        self.drafter = drafter.to(device=device, dtype=target.dtype).eval()
        length = CONTEXT + gamma + 1
        self.cache = target.new_cache(requests, length)
        layers, kv_heads, width = drafter.cache_geometry()
        self.store = RaggedKVCache([(kv_heads, width)] * layers, requests, length, target.dtype, device)
        self.rows, self.starts = list(range(requests)), [CONTEXT] * requests
        self.ids = torch.randint(4, scale.vocab, (requests,), device=device)
        self.uniform = torch.rand(requests, gamma, device=device)
        self.hidden = torch.randn(requests, gamma, scale.hidden, device=device, dtype=target.dtype)
        self.base = target.head.logits(self.hidden)
        self.sampling = Sampling(1.0)

    def backbone(self) -> None:
        """One parallel pass and its vocabulary product."""
        plan = self.store.block_pass(self.rows, self.starts, self.gamma)
        block = self.drafter._embed_block(self.ids)
        hidden = self.drafter.backbone.decode(block.flatten(0, 1), plan)
        self.target.head.logits(hidden)

    def head(self) -> None:
        """The loop over the block: bias, distribution, draw."""
        self.drafter._sample_block(self.hidden, self.base, self.ids, self.sampling, self.uniform)

    def draws(self) -> None:
        """What a parallel drafter does instead: distributions and draws of all positions at once."""
        self.sampling.sample(self.base, self.uniform)

    def verify(self) -> None:
        """The target over every drafted token and its distributions."""
        count = self.gamma + 1
        tokens = self.ids.repeat_interleave(count)
        plan = self.cache.causal_pass(self.rows, self.starts, [count] * self.requests)
        _, final = self.target.forward_ragged(tokens, plan)
        self.sampling.probs(self.target.logits(final))


@torch.no_grad()
def measure(target: Target, scale: Scale, head: str, requests: int, gamma: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the parts; the head's own cost is its loop less the draws that every drafter makes."""
    parts = Round(target, head, scale, requests, gamma)
    times = alternated(
        {"backbone": parts.backbone, "head": parts.head, "draws": parts.draws, "verify": parts.verify}, repeats
    )
    own = max(0.0, times["head"] - times["draws"])
    whole = times["backbone"] + times["head"] + times["verify"]
    return {
        "head": head,
        "batch": requests,
        "gamma": gamma,
        **{f"{name}_ms": 1000 * value for name, value in times.items()},
        "head_own_ms": 1000 * own,
        "head_own_percent_of_round": 100 * own / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("smollm2", "qwen3_4b"), default="smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    scale = {"smollm2": SMOLLM2, "qwen3_4b": QWEN3_4B}[arguments.scale]
    torch.manual_seed(0)
    target = random_target(scale, device, torch.bfloat16)
    rows = [
        measure(target, scale, head, batch, gamma, arguments.repeats)
        for head in HEADS
        for gamma in arguments.gammas
        for batch in arguments.batches
    ]
    keys = {
        f"{head}_percent_batch{max(arguments.batches)}_gamma7": row["head_own_percent_of_round"]
        for head in HEADS
        for row in rows
        if (row["head"], row["batch"], row["gamma"]) == (head, max(arguments.batches), 7)
    }
    report("sequential_head", rows, keys, device, arguments.json)


if __name__ == "__main__":
    main()
