"""A training step of ours against a plain dense implementation of the same formulas: seconds and extra peak memory.

The dense one keeps every logit: a dense [A*G, S + A*G] mask, full draft and target logits per slot, autograd through
softmaxes. Both give the same loss and gradients; that is checked before anything is timed.

    python benchmarks/train_step.py [--device cpu|cuda] [--json FILE]
    python benchmarks/train_step.py --device meta      # bytes and FLOPs at Qwen3-4B scale, nothing is computed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dspark_exp.contracts import AnchorBlocks, FrozenHead, TargetFacts, TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.drafters import DSparkDrafter
from dspark_exp.objectives import BlockObjective
from measure import alternated, flops, matmul_rate, peak_bytes, report


@dataclass(frozen=True)
class Scale:
    """Sizes of a step: one sequence of ``context`` supervised tokens."""

    name: str
    hidden: int = 576
    layers: int = 5
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocab: int = 49_152
    context: int = 256
    gamma: int = 7
    rank: int = 256
    taps: int = 5
    anchors: int = 24


SMALL = Scale("small", 128, 3, 4, 2, 32, 320, 1_600, 256, 7, 64, 3)
SMOLLM2 = Scale("smollm2")
QWEN3_4B = Scale("qwen3_4b", 2560, 5, 32, 8, 128, 9728, 151_936, 4096, 7, 256, 5, 512)


@dataclass(frozen=True)
class Step:
    """Everything that one step reads."""

    drafter: DSparkDrafter
    features: TargetFeatures
    blocks: AnchorBlocks
    objective: BlockObjective


def build(scale: Scale, device: torch.device, checkpoint: bool = True) -> Step:
    """Random weights and features."""
    torch.manual_seed(0)
    facts = TargetFacts(
        name=scale.name, family="qwen3", hidden_size=scale.hidden, num_layers=scale.taps + 3, num_heads=scale.heads,
        num_kv_heads=scale.kv_heads, head_dim=scale.head_dim, intermediate_size=scale.intermediate, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=8192,
        vocab_size=scale.vocab, num_usable_tokens=scale.vocab, layer_ids=tuple(range(scale.taps)),
        mask_token_id=scale.vocab - 1, pad_token_id=0, stop_ids=(1,), layer_windows=(None,) * (scale.taps + 3),
        layer_kv=((scale.kv_heads, scale.head_dim),) * (scale.taps + 3),
    )  # fmt: skip
    frozen = FrozenHead(
        nn.Embedding(scale.vocab, scale.hidden).requires_grad_(False).to(device),
        nn.Linear(scale.hidden, scale.vocab, bias=False).requires_grad_(False).to(device),
    )
    drafter = DSparkDrafter(
        facts,
        frozen,
        scale.layers,
        scale.gamma,
        head="markov",
        head_rank=scale.rank,
        confidence_head=True,
        checkpoint=checkpoint,
    ).to(device)
    nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.02)
    ids = torch.randint(0, scale.vocab, (1, scale.context), device=device)
    marks = torch.ones_like(ids, dtype=torch.bool)
    taps = torch.randn(1, scale.context, scale.taps * scale.hidden, device=device)
    final = torch.randn(1, scale.context, scale.hidden, device=device)
    blocks = draw_anchors(ids, marks, scale.anchors, scale.gamma, torch.Generator().manual_seed(1))
    return Step(drafter, TargetFeatures(ids, marks, taps, final), blocks, BlockObjective(0.1, 0.9, 1.0))


def ours(step: Step) -> Tensor:
    """The loss as training computes it."""
    output = step.drafter(step.features, step.blocks)
    return step.objective(output, step.blocks, step.features, step.drafter.frozen, 1.0, lambda value: value).loss


def dense(step: Step) -> Tensor:
    """The same loss, written plainly: all logits at once, autograd through everything."""
    drafter, features, blocks, objective = step.drafter, step.features, step.blocks, step.objective
    backbone = drafter.backbone
    kept = backbone.attention, backbone.checkpoint
    backbone.attention, backbone.checkpoint = "sdpa", False  # the dense mask, every activation
    output = drafter(features, blocks)
    backbone.attention, backbone.checkpoint = kept
    head = drafter.frozen.lm_head.weight
    logits = output.hidden @ head.T + output.bias_features @ output.bias_weight.T  # [N, A, G, V]
    gamma, length = blocks.labels.shape[-1], features.final.shape[1]
    before = (blocks.positions[..., None] + torch.arange(gamma, device=head.device)).clamp(max=length - 1)
    target = features.final[torch.zeros_like(before), before] @ head.T  # one row of logits for every slot
    draft_probs, target_probs = logits.softmax(-1), target.softmax(-1)
    distance = (draft_probs - target_probs).abs().sum(-1)
    cross = -logits.log_softmax(-1).gather(-1, blocks.labels[..., None]).squeeze(-1)
    accept = (1 - distance / 2).clamp(0, 1).detach()
    confidence = nn.functional.binary_cross_entropy_with_logits(output.confidence_logits, accept, reduction="none")
    weights = torch.exp(-torch.arange(gamma, device=head.device) / objective.decay) * blocks.live
    terms = objective.ce * cross + objective.l1 * distance + objective.confidence * confidence
    return (weights * terms).sum() / weights.sum()


def gradients(step: Step, loss: Callable[[Step], Tensor]) -> dict[str, Tensor]:
    step.drafter.zero_grad(set_to_none=True)
    loss(step).backward()
    return {name: p.grad.clone() for name, p in step.drafter.named_parameters() if p.grad is not None}


def backward(step: Step, loss: Callable[[Step], Tensor]) -> Callable[[], None]:
    def work() -> None:
        step.drafter.zero_grad(set_to_none=True)
        loss(step).backward()

    return work


def extra_bytes(step: Step, loss: Callable[[Step], Tensor], device: torch.device) -> int:
    """Peak bytes of a step beside weights and gradients."""
    parameters = [p for p in step.drafter.parameters() if p.requires_grad]
    step.drafter.zero_grad(set_to_none=True)

    def work() -> None:
        loss(step).backward()

    peak = peak_bytes(work, device, lambda: {p.grad.data_ptr() for p in parameters if p.grad is not None})
    if device.type == "cuda":
        peak -= sum(p.numel() * p.element_size() for p in parameters)
    return peak


def compare(scale: Scale, device: torch.device, repeats: int, rate: float, checkpoint: bool) -> dict[str, Any]:
    """One row: equality first, then time and memory of both."""
    step = build(scale, device, checkpoint)
    plain, chunked = gradients(step, dense), gradients(step, ours)
    for name, wanted in plain.items():
        error = (chunked[name] - wanted).norm() / wanted.norm().clamp(min=1e-12)
        assert error < 1e-3, f"{name}: gradients differ by {error:.1e}"
    del plain, chunked
    works = {"dense": backward(step, dense), "ours": backward(step, ours)}
    memory = {name: extra_bytes(step, loss, device) for name, loss in (("dense", dense), ("ours", ours))}
    times = alternated(works, repeats)
    operations = flops(works["ours"])
    return {
        "scale": scale.name,
        "anchors": scale.anchors,
        "context": scale.context,
        "checkpoint": checkpoint,
        "dense_s": times["dense"],
        "ours_s": times["ours"],
        "dense_mb": memory["dense"] / 1e6,
        "ours_mb": memory["ours"] / 1e6,
        "time_ratio": times["ours"] / times["dense"],
        "memory_ratio": memory["ours"] / memory["dense"],
        "gemm_fraction": operations / times["ours"] / rate,
    }


def ours_alone(scale: Scale, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time and memory where the dense one need not fit: for the slopes."""
    step = build(scale, device)
    work = backward(step, ours)
    work()
    memory = extra_bytes(step, ours, device)
    times = alternated({"ours": work}, repeats)
    return {
        "scale": scale.name,
        "anchors": scale.anchors,
        "context": scale.context,
        "ours_s": times["ours"],
        "ours_mb": memory / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rate = matmul_rate(device)
    rows = [
        compare(scale, device, arguments.repeats, rate, checkpoint)
        for scale in (SMALL, replace(SMOLLM2, anchors=24), replace(SMOLLM2, anchors=96))
        for checkpoint in (False, True)
    ]
    keys = {
        f"{name}_{row['anchors']}": row[name]
        for row in rows[2:]
        if row["checkpoint"]
        for name in ("memory_ratio", "time_ratio", "gemm_fraction")
    }
    keys["matmul_tflops"] = rate / 1e12
    report("train_step", rows, keys, device, arguments.json)


if __name__ == "__main__":
    main()
