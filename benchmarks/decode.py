"""Decoding speed of a trained drafter: against Transformers' own `generate`, and of the batch against one request.

    python benchmarks/decode.py --target PATH_OR_ID --drafter FOLDER --prompts gsm8k.jsonl [--json FILE]

``FOLDER`` is an export of layout deepspec. Without arguments: the embedded target with an untrained drafter, which
shows the table but no speed-up. Keys, at temperature 1 tokens per second of the same loop over the same requests:
`batch32_over_batch1` as DSpark decodes, verification lengths by Algorithm 1 over rounds that are measured first;
`batch32_over_batch1_full` with whole blocks verified. `spec_over_plain_batch1` is at temperature 0 against `generate`
of the same target, same tokens, both in float32. On a CPU weights are packed for decoding, as in every run
(`evaluation.packed_gb`); keys that end in `_unpacked` are measured without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dspark_exp.allocator import keep_freed_memory
from dspark_exp.data.benchmarks import synthetic_prompts
from dspark_exp.data.rendering import render_prompt
from dspark_exp.decoding import Generation, Request, Sampling, SpeculativeLoop, VerificationPolicy
from dspark_exp.drafters import DSparkDrafter, in_dtype
from dspark_exp.interop import read_config, read_drafter
from dspark_exp.onednn import pack_linears
from dspark_exp.scheduling import CapacityCurve, PrefixScheduler, Rounds
from dspark_exp.targets import RaggedKVCache, Target, load_target, location_of
from dspark_exp.tasks.round_times import round_seconds
from measure import report

BATCHES = (1, 4, 16, 32, 64)
COPIES = 4  # samples of each prompt; the two batch sizes of a ratio take turns, once a copy


@dataclass(frozen=True)
class Timed:
    """Tokens per second of one way of decoding, and what the rounds were like."""

    tokens_per_s: float
    generations: list[Generation]
    loop: SpeculativeLoop

    @property
    def tau(self) -> float:
        rounds = [r for g in self.generations for r in g.rounds]
        return sum(r.emitted for r in rounds) / max(1, len(rounds))


def load(arguments: argparse.Namespace, dtype: str) -> tuple[Target, nn.Module]:
    """Target and drafter; the drafter's own layer ids and mask decide the target's."""
    target, network = _load(arguments.target, arguments.drafter, dtype, arguments.device)
    target.attention = arguments.attention
    return target, network


def pack(target: Target, drafter: nn.Module) -> None:
    pack_linears(target.model, drafter, drafter.frozen.lm_head)


def _load(path: str, drafter: str | None, dtype: str, device: str) -> tuple[Target, nn.Module]:
    if drafter is None:
        target = load_target("tiny", path, dtype=dtype, device=device, num_feature_layers=3)
        torch.manual_seed(0)
        network = DSparkDrafter(target.facts, target.head, 3, 7, head="markov", head_rank=64, confidence_head=True)
        return target, network.eval().to(device)
    config = read_config(drafter)
    target = load_target(
        Path(path).name,
        path,
        dtype=dtype,
        device=device,
        layer_ids=config.layer_ids,
        mask_token_id=config.mask_token_id,
    )
    return target, in_dtype(read_drafter(drafter, target), torch.bfloat16).eval()


def prompts_of(target: Target, path: str | None, count: int) -> list[list[int]]:
    """Rendered prompts: first turns of a JSONL file, or of the synthetic language."""
    if path is None:
        texts = [p.messages[0]["content"] for p in synthetic_prompts(["chain_sums"], "evaluation", count)["chain_sums"]]
    else:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["turns"][0] for line in lines if line.strip()][:count]
    return [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]


def decode(
    target: Target,
    drafter: nn.Module | None,
    requests: list[Request],
    temperature: float,
    batch: int,
    policy: VerificationPolicy | None = None,
) -> Timed:
    """One run of the loop, prefill included; without a policy whole blocks are verified."""

    def make_cache(layers: int, rows: int, kv_heads: int, length: int, width: int) -> RaggedKVCache:
        layer_kv = [(kv_heads, width)] * layers
        return RaggedKVCache(layer_kv, rows, length, drafter.dtype, target.device, target.attention)

    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(temperature), policy, batch)  # type: ignore[arg-type]
    loop.run([Request(r.prompt_ids, 4, r.seed) for r in requests[:2]])  # warm-up
    generations = loop.run(requests)
    return Timed(sum(len(g.token_ids) for g in generations) / loop.clock.total_s, generations, loop)


def row_of(name: str, batch: int, timed: Timed) -> dict[str, Any]:
    """Speed, accepted length, and the share of time of each part."""
    clock = timed.loop.clock
    known = clock.prefill_s + clock.draft_s + clock.head_s + clock.verify_s + clock.extend_s
    shares = {
        "prefill": clock.prefill_s, "draft": clock.draft_s, "head": clock.head_s, "verify": clock.verify_s,
        "extend": clock.extend_s, "host": clock.total_s - known,
    }  # fmt: skip
    return {
        "decoding": name,
        "batch": batch,
        "tokens_per_s": timed.tokens_per_s,
        "tau": timed.tau,
        **{f"{part} %": 100 * seconds / clock.total_s for part, seconds in shares.items()},
    }


def transformers_decoder(path: str, limit: int, stop: tuple[int, ...]) -> Callable[..., tuple[list[int], float]]:
    """``decode(prompt, **extra) -> tokens, seconds`` of Transformers' own `generate`: greedy, float32, batch 1."""
    model = AutoModelForCausalLM.from_pretrained(location_of(path), dtype=torch.float32).eval()
    settings = {"do_sample": False, "eos_token_id": list(stop), "pad_token_id": stop[0]}

    @torch.no_grad()
    def generate(ids: list[int], max_new_tokens: int = limit, **extra: Any) -> tuple[list[int], float]:
        started = time.perf_counter()
        output = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, **settings, **extra)
        return output[0, len(ids) :].tolist(), time.perf_counter() - started

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the target at temperature 1")
    parser.add_argument("--attention", default="auto", help="of the caches: sdpa or flex")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        keep_freed_memory()  # as every run does, for Transformers' own decoding, too
    rows: list[dict[str, Any]] = []
    keys: dict[str, float] = {}
    for part in (at_temperature_0, at_temperature_1):
        more_rows, more_keys = part(arguments)
        rows, keys = rows + more_rows, keys | more_keys
    report("decode", rows, keys, torch.device(arguments.device), arguments.json)


def at_temperature_0(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One request at a time, float32: Transformers, ours without and with packed weights, in turns prompt by prompt."""
    on_cpu, limit = arguments.device == "cpu", arguments.new_tokens
    layouts = {layout: load(arguments, "float32") for layout in (("unpacked", "packed") if on_cpu else ("",))}
    if on_cpu:
        pack(*layouts["packed"])
    target, _ = next(iter(layouts.values()))
    prompts = prompts_of(target, arguments.prompts, arguments.num_prompts)
    theirs: dict[str, list[tuple[list[int], float]]] = {"generate": [], "prompt lookup": []}
    ours: dict[tuple[str, str], list[Timed]] = {(w, layout): [] for layout in layouts for w in ("plain", "drafter")}
    generate = transformers_decoder(arguments.target, limit, target.facts.stop_ids) if on_cpu else None
    for index, ids in enumerate(prompts):
        if generate is not None:
            if index == 0:
                generate(ids, 4)  # warm-up, as `decode` does it
            theirs["generate"].append(generate(ids))
            theirs["prompt lookup"].append(generate(ids, prompt_lookup_num_tokens=7))
        for (way, layout), runs in ours.items():
            target, drafter = layouts[layout]
            runs.append(decode(target, drafter if way == "drafter" else None, [Request(ids, limit, index)], 0.0, 1))
    speeds = {way: sum(len(t) for t, _ in runs) / sum(s for _, s in runs) for way, runs in theirs.items() if runs}
    rows = [
        {"decoding": f"transformers {way}, T=0", "batch": 1, "tokens_per_s": speed} for way, speed in speeds.items()
    ]
    keys = {}
    for (way, layout), runs in ours.items():
        timed = joined(runs)
        rows.append(row_of(f"{way}, T=0 {layout}".strip(), 1, timed))
        if way == "drafter" and on_cpu:
            same = [g.token_ids for g in timed.generations] == [tokens for tokens, _ in theirs["generate"]]
            assert same, "greedy tokens differ from Transformers'"
            end = "_unpacked" if layout == "unpacked" else ""
            keys[f"spec_over_plain_batch1{end}"] = timed.tokens_per_s / speeds["generate"]
            keys[f"break_even_tau{end}"] = timed.tau * speeds["generate"] / timed.tokens_per_s
    return rows, keys


def at_temperature_1(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Batches of growing size, whole blocks and scheduled lengths; one and 32 requests in turns."""
    target, drafter = load(arguments, arguments.dtype)
    prompts, limit = prompts_of(target, arguments.prompts, arguments.num_prompts), arguments.new_tokens
    rows, keys = [], {}
    if arguments.device == "cpu":
        ours, keys["batch32_over_batch1_full_unpacked"] = in_turns(target, drafter, prompts, limit)
        rows += [row_of("drafter, T=1 unpacked", batch, timed) for batch, timed in ours.items()]
        pack(target, drafter)
    policies: dict[str, tuple[str, VerificationPolicy | None]] = {"whole blocks": ("_full", None)}
    if getattr(drafter, "confidence_head", None) is not None:
        policies["scheduled"] = "", PrefixScheduler(measured_rounds(target, drafter, prompts))
    for name, (end, policy) in policies.items():
        timed, keys[f"batch32_over_batch1{end}"] = in_turns(target, drafter, prompts, limit, policy)
        for batch in BATCHES:
            if batch not in timed:
                requests = copies_of(prompts, range(COPIES if batch < 64 else 2 * COPIES), limit)
                timed[batch] = decode(target, drafter, requests, 1.0, batch, policy)
            rows.append(row_of(f"drafter, T=1 {name}", batch, timed[batch]))
    plain, _ = in_turns(target, None, prompts, limit)
    return rows + [row_of("plain, T=1", batch, timed) for batch, timed in plain.items()], keys


def in_turns(
    target: Target,
    drafter: nn.Module | None,
    prompts: list[list[int]],
    limit: int,
    policy: VerificationPolicy | None = None,
) -> tuple[dict[int, Timed], float]:
    """One request and 32 at a time, the same requests, in turns, so that a slow minute hits both; and their ratio."""
    runs: dict[int, list[Timed]] = {1: [], 32: []}
    for copy in range(COPIES):
        runs[1].append(decode(target, drafter, copies_of(prompts, [copy], limit), 1.0, 1, policy))
        runs[32].append(decode(target, drafter, copies_of(prompts, range(COPIES), limit), 1.0, 32, policy))
    timed = {batch: joined(of_batch) for batch, of_batch in runs.items()}
    return timed, timed[32].tokens_per_s / timed[1].tokens_per_s


def joined(runs: list[Timed]) -> Timed:
    """Several runs as one; shares of time are the last one's."""
    generations = [g for run in runs for g in run.generations]
    seconds = sum(run.loop.clock.total_s for run in runs)
    return Timed(sum(len(g.token_ids) for g in generations) / seconds, generations, runs[-1].loop)


def measured_rounds(target: Target, drafter: nn.Module, prompts: list[list[int]]) -> CapacityCurve:
    """Seconds of whole rounds by requests and verified tokens, as `task=profile_capacity` measures them."""
    lengths = list(range(drafter.block_size + 1))  # type: ignore[arg-type]
    seconds = []
    for batch in BATCHES:
        several = [prompts[i % len(prompts)] for i in range(batch)]
        seconds.append(round_seconds(target, drafter, Sampling(1.0), several, [-1, *lengths], repeats=3))
    table = np.asarray(seconds)
    rounds = Rounds(np.asarray(BATCHES), np.asarray(lengths), table[:, 1:], table[:, 0])
    return CapacityCurve(np.asarray(BATCHES), table[:, 0], rounds)


def copies_of(prompts: list[list[int]], copies: Iterable[int], new_tokens: int) -> list[Request]:
    return [Request(ids, new_tokens, seed=100 * i + c) for c in copies for i, ids in enumerate(prompts)]


if __name__ == "__main__":
    main()
