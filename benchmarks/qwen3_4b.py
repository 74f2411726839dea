"""A short run at Qwen3-4B size with random weights: one drafter trained for a few steps, then decoding in a batch.

Seconds a step, extra memory, tokens per second. Random weights accept almost nothing: the speed of a round is what
counts here, not tau. ``--scale smollm2`` tries the same code on a CPU.

    python benchmarks/qwen3_4b.py [--device cuda] [--scale qwen3_4b] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from decode import decode
from dspark_exp.decoding import Request
from dspark_exp.drafters import DSparkDrafter
from dspark_exp.targets import Target
from measure import report
from sequential_head import random_target
from train_step import QWEN3_4B, SMOLLM2, Scale, Step, backward, build, extra_bytes, ours


def train(scale: Scale, device: torch.device, steps: int) -> dict[str, Any]:
    """Steps of forward, backward and AdamW under bfloat16 autocast."""
    step: Step = build(scale, device)
    optimizer = torch.optim.AdamW([p for p in step.drafter.parameters() if p.requires_grad], lr=1e-4, fused=True)
    work = backward(step, ours)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        work()
        memory = extra_bytes(step, ours, device)
        started = time.perf_counter()
        for _ in range(steps):
            work()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / steps
    slots = scale.anchors * scale.gamma
    return {"part": "train", "seconds_a_step": seconds, "slots_per_s": slots / seconds, "extra_mb": memory / 1e6}


@torch.no_grad()
def rounds(target: Target, scale: Scale, batch: int, new_tokens: int) -> list[dict[str, Any]]:
    """Decoding with a random drafter, and plainly."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(
        target.facts, target.head, scale.layers, scale.gamma, head="markov", head_rank=scale.rank, confidence_head=True
    )
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval()
    requests = [Request(list(range(10 + i, 74 + i)), new_tokens, seed=i) for i in range(batch)]
    found = []
    for name, network in (("drafter", drafter), ("plain", None)):
        timed = decode(target, network, requests, 1.0, batch)
        count = sum(len(g.rounds) for g in timed.generations)
        clock = timed.loop.clock
        found.append(
            {
                "part": f"decode, {name}",
                "batch": batch,
                "tokens_per_s": timed.tokens_per_s,
                "ms_a_round": 1000 * (clock.total_s - clock.prefill_s) / (count / batch),
                "tau": timed.tau,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("smollm2", "qwen3_4b"), default="qwen3_4b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    scale = {"smollm2": replace(SMOLLM2, anchors=24), "qwen3_4b": QWEN3_4B}[arguments.scale]
    rows = [train(scale, device, arguments.steps)]
    target = random_target(scale, device, torch.bfloat16)
    for batch in arguments.batches:
        rows += rounds(target, scale, batch, arguments.new_tokens)
    report(f"random weights, {scale.name}", rows, {"train_s": rows[0]["seconds_a_step"]}, device, arguments.json)


if __name__ == "__main__":
    main()
