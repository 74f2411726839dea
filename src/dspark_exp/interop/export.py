"""Write a drafter for a reader, read it back independently, and say in a manifest what each convention is.

In: a drafter, its target, a folder. Out: config.json, weights, manifest, calibration file, a one-batch golden file.
An export that does not read back to the same logits fails and leaves no folder behind.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark_exp.calibration import Calibration, identity
from dspark_exp.drafters import in_dtype
from dspark_exp.errors import CheckpointError
from dspark_exp.hashing import file_digest
from dspark_exp.interop.checkpoint_files import SHARD_BYTES, write_tensors
from dspark_exp.interop.layouts import SHARED, Layout, layout_for, rounded
from dspark_exp.interop.minimal_reader import Draft, MinimalReader
from dspark_exp.scheduling import CapacityTable
from dspark_exp.targets import RaggedKVCache, Target

_TOLERANCE = 1e-3  # of logits; float32 sums in two orders differ by about 1e-5
_CONTEXT = 24


@dataclass(frozen=True)
class Exported:
    """Where the export lies and what was measured when it was read back."""

    folder: Path
    max_logit_error: float
    manifest: dict[str, Any]


def export_drafter(
    drafter: nn.Module,
    target: Target,
    folder: Path,
    *,
    reader: str,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    source: str = "",
    model_card: str = "",
    calibration: Calibration | None = None,
    capacity: CapacityTable | None = None,
) -> Exported:
    """Write, verify, describe. Without a calibration the temperatures are 1; a capacity table ships as ``sps.json``.

    Raises:
        CheckpointError: the reader cannot read this drafter (with the reason), the folder exists, or what was written
            does not read back to the same tokens and logits.
    """
    layout = layout_for(reader, drafter, target)
    if folder.exists():
        raise CheckpointError(f"{folder} exists; give another export.dir or remove it.")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        config = layout.config | {"dtype": str(dtype).removeprefix("torch.")}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tensors(rounded(layout, dtype), partial, shard_bytes)
        error, golden = _read_back(partial, drafter, target, dtype)
        save_file(golden, partial / "golden.safetensors")
        fitted = None
        if drafter.confidence_head is not None:
            fitted = calibration or identity(int(drafter.block_size))  # type: ignore[arg-type]
            (partial / "sts.json").write_text(json.dumps(fitted.as_dict(), indent=2) + "\n")
        if capacity is not None:
            (partial / "sps.json").write_text(json.dumps(capacity.as_dict(), indent=1) + "\n")
        if model_card:
            (partial / "README.md").write_text(model_card)
        manifest = _manifest(layout, drafter, target, reader, config, error, source, fitted, capacity)
        manifest["files_sha256"] = {path.name: file_digest(path) for path in sorted(partial.iterdir())}
        (partial / "export_manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(folder, error, manifest)


class _GreedyRecorder:
    """A sampler that takes the most likely token and keeps the logits it saw."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits)
        return logits.argmax(-1), None


@torch.no_grad()
def draft_greedily(drafter: Any, target: Target, ids: list[int], taps: Tensor | None = None) -> Draft:
    """One greedy block of our own drafter after ``ids``, through its decoding path.

    Args:
        taps: target features [len(ids) - 1, m*d] of the tokens before the last; null = the target computes them.
    """
    anchor = len(ids) - 1
    tokens = torch.tensor([ids], device=target.device)
    if taps is None:
        taps = target.features(tokens[:, :-1], torch.ones_like(tokens[:, :-1]))[0][0]
    layers, kv_heads, width = drafter.cache_geometry()
    store = RaggedKVCache([(kv_heads, width)] * layers, 1, anchor + drafter.block_size, torch.float32, target.device)
    carry = drafter.extend(store, [0], [0], [anchor], taps, tokens[0, 1:])
    sampler, uniform = _GreedyRecorder(), torch.zeros(1, drafter.block_size, device=target.device)
    proposal = drafter.propose(store, [0], [anchor], tokens[:, -1], carry, sampler, uniform)
    logits = torch.cat([part.reshape(-1, part.shape[-1]) for part in sampler.logits])
    confidence = None if proposal.confidence is None else proposal.confidence[0].logit().cpu()
    return Draft(proposal.tokens[0].tolist(), logits.cpu(), confidence)


def _read_back(folder: Path, drafter: nn.Module, target: Target, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Largest logit error of the independent reader over two prompts, and the golden batch.

    Raises:
        CheckpointError: other tokens, logits or confidences than our own drafter with equally rounded weights.
    """
    head = target.head
    reader = MinimalReader(folder, head.embedding.weight.cpu(), head.lm_head.weight.cpu())
    ours = _rounded_copy(drafter, dtype)
    generator = torch.Generator().manual_seed(0)
    usable = target.facts.num_usable_tokens
    worst = 0.0
    golden: dict[str, Tensor] = {}
    for number in range(2):
        ids = torch.randint(0, usable, (_CONTEXT + 1,), generator=generator).tolist()
        states = _plain_hidden_states(target, ids[:-1])
        taps = torch.cat([states[layer + 1] for layer in target.facts.layer_ids], dim=-1).float()
        theirs = reader.draft(states, ids)
        worst = max(worst, _difference(draft_greedily(ours, target, ids, taps.to(target.device)), theirs, usable))
        golden |= {
            f"{number}.input_ids": torch.tensor(ids),
            f"{number}.draft_tokens": torch.tensor(theirs.tokens),
            f"{number}.draft_logits": theirs.logits,
        }
    return worst, golden


def _rounded_copy(drafter: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The drafter with its weights rounded as they are written, over a float32 copy of the target's LM head.

    In float32 the comparison shows a wrong convention, not the rounding of a bfloat16 product.
    """
    ours = copy.deepcopy(in_dtype(drafter, torch.float32))
    ours.load_state_dict({name: tensor.to(dtype).to(tensor.dtype) for name, tensor in drafter.state_dict().items()})
    return ours.eval()


@torch.no_grad()
def _plain_hidden_states(target: Target, ids: list[int]) -> list[Tensor]:
    """[S, d] of every layer from Transformers itself, not from our taps."""
    tokens = torch.tensor([ids], device=target.device)
    states = target.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return [state[0].cpu() for state in states]


def _difference(ours: Draft, theirs: Draft, usable: int) -> float:
    error = float((ours.logits[:, :usable] - theirs.logits[:, :usable]).abs().max())
    if ours.confidence is not None:
        if theirs.confidence is None:
            raise CheckpointError("The export reads back without its confidence head.")
        error = max(error, float((ours.confidence - theirs.confidence).abs().max()))
    scale = max(1.0, float(ours.logits[:, :usable].abs().max()))
    if ours.tokens != theirs.tokens or error > _TOLERANCE * scale:
        raise CheckpointError(
            f"The export does not read back: drafted {theirs.tokens} instead of {ours.tokens}, logits off by "
            f"{error:.2g}. Nothing was kept."
        )
    return error


def _said_of(calibration: Calibration) -> str:
    if calibration == identity(len(calibration.temperatures)):
        return "sts.json holds temperatures of 1: not calibrated"
    return f"sts.json: fitted on {calibration.num_samples} rounds of {calibration.dataset} ({calibration.fitted_on})"


def _manifest(
    layout: Layout,
    drafter: nn.Module,
    target: Target,
    reader: str,
    config: dict[str, Any],
    error: float,
    source: str,
    fitted: Calibration | None,
    capacity: CapacityTable | None,
) -> dict[str, Any]:
    facts = target.facts
    meaning = "0-based decoder layers, their output" if layout.offset == 0 else "1 + the 0-based decoder layer"
    return {
        "reader": reader,
        "reader_status": "written after the reader's published field names; read back by an independent reader of "
        "this package, not by the engine itself",
        "drafter": type(drafter).__name__,
        "algorithm": config.get("speculators_model_type") or config["architectures"][0],
        "block_layout": "anchor first: gamma inputs (anchor and gamma-1 masks) give gamma draft tokens",
        "num_speculative_tokens": int(drafter.block_size),  # type: ignore[arg-type]
        "layer_ids": {
            "decoder_layers": list(facts.layer_ids),
            "written_as": layout.layer_ids,
            "meaning": f"{meaning} = Transformers hidden_states[{'i + 1' if layout.offset == 0 else 'i'}]",
        },
        "mask_token_id": facts.mask_token_id,
        "embedding_and_lm_head": {
            name: f"in the file, {target.dtype}" if name in layout.tensors else "the target's" for name in SHARED
        },
        "dtype": config["dtype"],
        "calibration": None if fitted is None else _said_of(fitted),
        "capacity_curve": None if capacity is None else f"sps.json: measured with {capacity.measured}",
        "target": target.fingerprint(),
        "source": source,
        "read_back": {"max_logit_error": error, "tolerance": _TOLERANCE},
        "serve": layout.serve,
        "notes": list(layout.notes),
    }
