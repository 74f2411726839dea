"""A training step of ours against a plain dense implementation of the same formulas: seconds and extra peak memory.

The dense one keeps every logit: a dense [A*G, S + A*G] mask, full draft and target logits per slot, autograd through
softmaxes. Both give the same loss and gradients; that is checked before anything is timed.

    python benchmarks/train_step.py [--device cpu|cuda] [--slopes] [--json FILE]
    python benchmarks/train_step.py --device meta      # bytes and FLOPs at Qwen3-4B scale, nothing is computed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dspark_exp.contracts import AnchorBlocks, FrozenHead, TargetFacts, TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.drafters import DSparkDrafter
from dspark_exp.drafters.packing import Index, Packing
from dspark_exp.objectives import BlockObjective
from dspark_exp.objectives.fused import CHUNK_ELEMENTS
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


def packed_against_padded(device: torch.device, repeats: int) -> dict[str, Any]:
    """A batch of short and long conversations, packed and as a padded rectangle; the losses are equal."""
    step = build(replace(SMOLLM2, anchors=48), device)
    lengths = torch.tensor([256, 128, 64, 32], device=device)
    marks = torch.arange(256, device=device) < lengths[:, None]
    one = step.features
    features = TargetFeatures(
        one.input_ids.repeat(4, 1), marks, one.taps.repeat(4, 1, 1), one.final.repeat(4, 1, 1), lengths
    )
    blocks = draw_anchors(features.input_ids, marks, 48, SMOLLM2.gamma, torch.Generator().manual_seed(1))
    ragged = replace(step, features=features, blocks=blocks)

    def rectangle(step: Step) -> Tensor:
        def everything(anchors: Tensor, live: Tensor, num_tokens: int) -> Packing:
            index = Index.of(torch.ones(len(anchors), num_tokens, dtype=torch.bool, device=device))
            slots = Index.of(torch.ones_like(live))
            return Packing(index, slots, index.padded % num_tokens, anchors.flatten(), anchors)

        with mock.patch.object(Packing, "of", everything):
            return ours(step)

    torch.testing.assert_close(ours(ragged), rectangle(ragged), atol=1e-5, rtol=1e-5)
    times = alternated({"packed": backward(ragged, ours), "padded": backward(ragged, rectangle)}, repeats)
    return {
        "scale": "smollm2, rows of 256, 128, 64, 32",
        "anchors": 48,
        "context": 256,
        "ours_s": times["packed"],
        "padded_s": times["padded"],
        "packed_over_padded": times["packed"] / times["padded"],
        "tokens_over_rectangle": float(lengths.sum()) / marks.numel(),
        "blocks_over_rectangle": float(blocks.live.any(-1).float().mean()),
    }


def ours_alone(scale: Scale, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time and memory where the dense one need not fit: for the slopes."""
    step = build(scale, device)
    seconds = alternated({"ours": backward(step, ours)}, repeats)["ours"]
    return {
        "scale": scale.name,
        "anchors": scale.anchors,
        "context": scale.context,
        "ours_s": seconds,
        "ours_mb": extra_bytes(step, ours, device) / 1e6,
        "computed_mb": extra_bytes_computed(scale) / 1e6,
    }


def extra_bytes_computed(scale: Scale, itemsize: int = 4, keeps_scores: bool = True) -> float:
    """Peak bytes beside weights and gradients, layers checkpointed: the larger of two moments.

    At the loss: every layer's input, and one chunk of draft and target logits with a widened tile. In the backward
    pass: every layer's input, and all of one layer: its projections, and (``keeps_scores``: without a fused attention
    kernel) its attention scores four times, as scored, joined, widened and normalised.
    """
    slots = scale.anchors * scale.gamma
    heads, width = scale.heads * scale.head_dim, 2 * scale.kv_heads * scale.head_dim
    kept = itemsize * (scale.layers * slots * scale.hidden + 4 * scale.context * scale.hidden)
    logits = min(CHUNK_ELEMENTS, slots * scale.vocab)
    targets = min(CHUNK_ELEMENTS, min(slots, scale.context) * scale.vocab)
    at_loss = kept + itemsize * (logits + targets) + 4 * (slots * (scale.hidden + scale.rank)) + 6 * TILE_BYTES
    layer = itemsize * (slots * (8 * scale.hidden + 4 * heads + 4 * scale.intermediate) + 4 * scale.context * width)
    scores = itemsize * scale.heads * slots * (scale.context + scale.gamma) * (4 if keeps_scores else 0)
    return max(at_loss, kept + layer + scores)


TILE_BYTES = 4 * (1 << 19)
_DRAWN = (("ours_s", "seconds a step"), ("ours_mb", "extra memory, MB"))


def at_qwen3_4b_scale() -> dict[str, Any]:
    """Bytes and FLOPs that are computed, not run: bfloat16, 512 anchors, FlexAttention (no scores are kept)."""
    scale = QWEN3_4B
    slots = scale.anchors * scale.gamma
    weights = scale.layers * (
        scale.hidden * scale.head_dim * (2 * scale.heads + 2 * scale.kv_heads) + 3 * scale.hidden * scale.intermediate
    )
    head = scale.hidden * scale.vocab
    operations = 8 * weights * slots + 4 * head * slots + 2 * head * min(slots, scale.context)
    operations += 6 * scale.vocab * scale.rank * slots + 6 * scale.taps * scale.hidden**2 * scale.context
    dense_logits = slots * scale.vocab * 4
    return {
        "scale": scale.name,
        "anchors": scale.anchors,
        "context": scale.context,
        "computed_mb": extra_bytes_computed(scale, itemsize=2, keeps_scores=False) / 1e6,
        "tflop": operations / 1e12,
        "one_copy_of_all_logits_mb": dense_logits / 1e6,
    }


def slopes(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Anchors at one context length, then context lengths at one number of anchors."""
    by_anchors = [replace(SMOLLM2, anchors=n) for n in (12, 24, 48, 96, 144)]
    by_context = [replace(SMOLLM2, anchors=48, context=n) for n in (128, 512, 1024)]
    return [ours_alone(scale, device, repeats) for scale in by_anchors + by_context]


def draw_slopes(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and extra memory against anchors and against context length, with straight lines through them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    for column, (name, other, fixed) in enumerate((("anchors", "context", 256), ("context", "anchors", 48))):
        picked = sorted((row for row in rows if row[other] == fixed), key=lambda row: row[name])
        x = np.array([row[name] for row in picked])
        for axis, key, unit in zip(
            axes[:, column], ("ours_s", "ours_mb"), ("seconds a step", "extra memory, MB"), strict=True
        ):
            y = np.array([row[key] for row in picked])
            slope, start = np.polyfit(x, y, 1)
            axis.plot(x, y, "o", color="#0072B2")
            axis.plot(x, start + slope * x, color="#0072B2", lw=1)
            axis.set_xlabel(f"{name} (at {fixed} {other})")
            axis.set_ylabel(unit)
            axis.set_ylim(0)
            axis.set_title(f"{slope:.3g} per {name.rstrip('s')}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A training step at SmolLM2 size: linear in anchors and in context")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slopes", action="store_true", help="also time over anchors and context, and draw it")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.device == "meta":
        report("train_step", [at_qwen3_4b_scale()], {}, torch.device("cpu"), arguments.json)
        return
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
    rows.append(packed_against_padded(device, arguments.repeats))
    keys["packed_over_padded"] = rows[-1]["packed_over_padded"]
    if arguments.slopes:
        lines = slopes(device, arguments.repeats)
        rows += lines
        keys["computed_over_measured_memory"] = max(row["computed_mb"] / row["ours_mb"] for row in lines)
        keys["measured_over_computed_memory"] = max(row["ours_mb"] / row["computed_mb"] for row in lines)
        if arguments.json:
            draw_slopes(lines, Path(arguments.json).with_suffix(".png"))
    rows.append(at_qwen3_4b_scale())
    keys["extra_gb_qwen3_4b_512_anchors"] = rows[-1]["computed_mb"] / 1000
    report("train_step", rows, keys, device, arguments.json)


if __name__ == "__main__":
    main()
