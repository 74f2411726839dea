"""What two ranks check of each other: ``torchrun -m tests.launch.rank_checks NAME ...`` (``test_ranks.py`` does it)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from dspark_exp.config import validated
from dspark_exp.contracts import AnchorBlocks, TargetFeatures
from dspark_exp.data.anchors import draw_anchors
from dspark_exp.data.feature_store import build_feature_store
from dspark_exp.data.rendering import Row
from dspark_exp.data.sources import Conversation
from dspark_exp.decoding import Request, Sampling, SpeculativeLoop
from dspark_exp.errors import ConfigError
from dspark_exp.launch import barrier, before_meeting, gathered, locked_together, num_ranks, rank, share
from dspark_exp.launch.ranks import _before_meeting, end_rank, join_ranks
from dspark_exp.objectives import BlockObjective, TrainingTimeTestObjective
from dspark_exp.targets import cut_over_ranks, rank_mesh, shard_over_ranks
from dspark_exp.tasks.building import open_target
from dspark_exp.tasks.evaluate import on_all_ranks
from dspark_exp.tasks.regenerate import read_records, regenerate
from tests.conftest import BLOCK_SIZE, composed, make_cache, make_drafter, random_target


class _Loss(nn.Module):
    """A drafter and its objective as one module, as DDP wraps a LightningModule."""

    def __init__(self, kind: str, drafter: nn.Module) -> None:
        super().__init__()
        self.kind, self.drafter = kind, drafter

    def forward(self, features: TargetFeatures, blocks: AnchorBlocks, sum_over_ranks) -> Tensor:
        drafter = self.drafter
        if self.kind == "eagle3":
            normed = [drafter.norm(hidden) for hidden in drafter(features, drafter.block_size)]
            return TrainingTimeTestObjective()(normed, features, drafter.frozen, sum_over_ranks).loss
        objective = BlockObjective(0.1, 0.9, 1.0)
        return objective(drafter(features, blocks), blocks, features, drafter.frozen, 1.0, sum_over_ranks).loss


def _sum_over_ranks(value: Tensor) -> Tensor:
    total = value.clone()
    distributed.all_reduce(total)
    return total


def _batch(dead_rows: slice) -> tuple[TargetFeatures, AnchorBlocks]:
    """Four conversations of random features; ``dead_rows`` have nothing supervised."""
    target = random_target()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 10, (4, 20), generator=generator)
    supervised = torch.ones_like(ids, dtype=torch.bool)
    supervised[dead_rows] = False
    with torch.no_grad():
        taps, final = target.features(ids, torch.ones_like(ids))
    blocks = draw_anchors(ids, supervised, 3, BLOCK_SIZE, generator)
    return TargetFeatures(ids, supervised, taps, final, torch.full((4,), 20)), blocks


def _rows(features: TargetFeatures, blocks: AnchorBlocks, rows: slice) -> tuple[TargetFeatures, AnchorBlocks]:
    picked = TargetFeatures(*(value[rows] for value in vars(features).values()))
    return picked, AnchorBlocks(**{name: value[rows] for name, value in vars(blocks).items()})


def _check_gradients(kind: str, dead_rows: slice) -> None:
    features, blocks = _batch(dead_rows)
    joint = _Loss(kind, make_drafter(kind, random_target()).train())
    loss = joint(features, blocks, lambda value: value)
    loss.backward()
    wrapped = DistributedDataParallel(_Loss(kind, make_drafter(kind, random_target()).train()))
    own = _rows(features, blocks, slice(2 * rank(), 2 * rank() + 2))
    part = wrapped(*own, _sum_over_ranks)
    (part * num_ranks()).backward()
    torch.testing.assert_close(_sum_over_ranks(part.detach()), loss.detach(), atol=1e-6, rtol=1e-6)
    alone, shared = dict(joint.named_parameters()), dict(wrapped.module.named_parameters())
    for name, parameter in alone.items():
        torch.testing.assert_close(
            shared[name].grad, parameter.grad, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def gradients_equal_one_process_on_the_joined_batch() -> None:
    for kind in ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3"):
        _check_gradients(kind, slice(0, 0))


def a_rank_with_nothing_live_neither_hangs_nor_changes_the_others() -> None:
    for kind in ("dspark_markov", "dspark_rnn", "eagle3"):
        _check_gradients(kind, slice(2, 4))  # all rows of rank 1


def results_come_back_in_the_order_of_the_items() -> None:
    for count in (0, 1, 2, 5, 8):
        items = list(range(count))
        assert gathered([10 * item for item in share(items)]) == [10 * item for item in items]


def sharded_decoding_equals_one_process() -> None:
    target = random_target()
    drafter = make_drafter("dspark_markov", target)
    requests = [Request([2, 3, 4 + index % 5], 10, seed=index) for index in range(7)]

    def loop() -> SpeculativeLoop:
        return SpeculativeLoop(target, drafter, make_cache, Sampling(1.0, 0, 1.0), batch_size=3)

    alone, shared = loop().run(requests), on_all_ranks(loop(), requests)
    assert [g.token_ids for g in shared] == [g.token_ids for g in alone]
    assert [[r.accepted for r in g.rounds] for g in shared] == [[r.accepted for r in g.rounds] for g in alone]


def a_sharded_target_equals_a_whole_one() -> None:
    """Each rank holds half of every layer, decodes another number of requests, and gets what it gets alone."""
    whole = random_target()
    sharded = shard_over_ranks(random_target(), rank_mesh("cpu"))
    before_meeting(sharded.catch_up)
    held = sum(p.to_local().numel() for p in sharded.body.layers.parameters())
    total = sum(p.numel() for p in whole.body.layers.parameters())
    assert abs(held - total / num_ranks()) < 0.02 * total
    ids = torch.randint(2, 10, (2 + rank(), 20), generator=torch.Generator().manual_seed(rank()))
    for _ in range(1 + 2 * rank()):
        for ours, wanted in zip(
            sharded.features(ids, torch.ones_like(ids)), whole.features(ids, torch.ones_like(ids)), strict=True
        ):
            assert torch.equal(ours, wanted)
    drafter = make_drafter("dspark_markov", whole)
    requests = [Request([2, 3, 4 + index % 5], 6 + 7 * (index % 2), seed=index) for index in range(7)]

    def loop(target) -> SpeculativeLoop:
        return SpeculativeLoop(target, drafter, make_cache, Sampling(1.0, 0, 1.0), batch_size=3)

    shared, alone = on_all_ranks(loop(sharded), requests), loop(whole).run(requests)
    assert [g.token_ids for g in shared] == [g.token_ids for g in alone]
    barrier()


def a_target_cut_across_ranks_equals_a_whole_one() -> None:
    """Each rank holds half of every projection, decodes another number of requests, and gets what it gets alone."""
    for family in ("qwen3", "llama", "gemma3"):
        whole, cut = random_target(family), cut_over_ranks(random_target(family), rank_mesh("cpu"))
        _before_meeting.clear()
        before_meeting(cut.catch_up)
        held, total = (sum(p.numel() for p in t.body.layers.parameters() if p.ndim == 2) for t in (cut, whole))
        assert held * num_ranks() == total
        ids = torch.randint(2, 10, (2 + rank(), 20), generator=torch.Generator().manual_seed(rank()))
        mask = torch.ones_like(ids)
        mask[0, 15:] = 0
        for _ in range(1 + 2 * rank()):
            for ours, wanted in zip(cut.features(ids, mask), whole.features(ids, mask), strict=True):
                torch.testing.assert_close(ours[mask > 0], wanted[mask > 0], atol=1e-4, rtol=1e-4)
        drafter = make_drafter("dspark_markov", whole)
        requests = [Request([2, 3, 4 + index % 5], 6 + 7 * (index % 2), seed=index) for index in range(7)]
        requests.append(Request([2, 3], 6, seed=9))  # shares its prefill

        def loop(target, drafter=drafter) -> SpeculativeLoop:
            return SpeculativeLoop(target, drafter, make_cache, Sampling(1.0, 0, 1.0), batch_size=3)

        for _ in range(2):  # the second on caches of its own
            shared = on_all_ranks(loop(cut), requests)
        alone = loop(whole).run(requests)
        assert [g.token_ids for g in shared] == [g.token_ids for g in alone]
        barrier()
        assert len(cut._caches) <= 2 * num_ranks()


def a_cut_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 does not divide by 2: this target allows 1 \(trainer\.devices"):
        cut_over_ranks(random_target("gemma4"), rank_mesh("cpu"))  # one key/value head in its full-attention layers


def preparation_is_shared() -> None:
    """Each rank computes its shards, both read the whole store."""
    tokens = [[2 + (index + step) % 7 for step in range(5 + index % 4)] for index in range(700)]
    rows = [Row(ids, [True] * len(ids)) for ids in tokens]
    calls = []

    def compute(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(ids))
        return ids[..., None].float().expand(*ids.shape, 2), mask[..., None].float()

    root = Path(os.environ["RANK_CHECKS_FOLDER"])
    with locked_together(root / "lock"):
        store = build_feature_store(
            root / "features", rows, compute, {}, feature_size=3, dtype="float32", max_gb=1.0, batch_size=64,
            device=torch.device("cpu"), pad_id=0,
        )  # fmt: skip
    assert sum(calls) == (256 + 700 - 2 * 256 if rank() == 0 else 256)  # shards 0 and 2, shard 1
    assert len(store) == 700
    for index in (0, 255, 256, 511, 699):
        assert store[index].input_ids.tolist() == rows[index].input_ids
        assert store[index].taps[:, 1].tolist() == [float(token) for token in rows[index].input_ids]


def regeneration_is_shared() -> None:
    root = Path(os.environ["RANK_CHECKS_FOLDER"])
    config = validated(composed("data.max_new_tokens=12", "data.regenerate_batch_size=4"))
    target = open_target(config)
    talks = [
        Conversation(tuple({"role": "user", "content": text} for text in texts), "chat", "test")
        for texts in (("thank you", "and again"), ("sum 3 and 4",), ("sum 7 and 9",), ("thanks",), ("add 2 and 2",))
    ]
    seen, dropped = regenerate(config, target, talks, root / "replies.jsonl", {"revision": "a"})
    records = {(r["index"], r["turn"]): r for r in read_records(root / "replies.jsonl")}
    assert {index for index, turn in records if turn == 0} == set(range(5))
    assert not list(root.glob("replies.rank*"))
    barrier()
    if rank() == 0:
        (root / "replies.jsonl").rename(root / "shared.jsonl")
    barrier()
    half = sorted(records)[::2]
    with (root / f"replies.rank{rank()}.jsonl").open("w") as stream:  # as a killed job of other ranks leaves them
        stream.writelines(json.dumps(records[key]) + "\n" for key in half[rank() :: num_ranks()])
    barrier()
    again, _ = regenerate(config, target, talks, root / "replies.jsonl", {"revision": "a"})
    assert [row.input_ids for row in again] == [row.input_ids for row in seen]
    assert not dropped


if __name__ == "__main__":
    torch.set_num_threads(1)
    join_ranks()
    for check in sys.argv[1:]:
        globals()[check]()
    end_rank()
