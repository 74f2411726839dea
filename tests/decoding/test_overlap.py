"""The analytic acceptance rate of a round (Eq. 8): against enumeration, and against what really passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark_exp.calibration import Observations
from dspark_exp.decoding import Fixed, Request, Round, Sampling, SpeculativeLoop, verify_block
from dspark_exp.targets import Target
from tests.conftest import BLOCK_SIZE, make_cache, make_drafter


def _rounds(target: Target, temperature: float, count: int = 40, **options) -> list[Round]:
    drafter = make_drafter("dspark_markov", target)
    loop = SpeculativeLoop(target, drafter, make_cache, Sampling(temperature), batch_size=8, **options)
    requests = [Request([3 + seed % 5, 4], 12, seed, ignore_stop=True) for seed in range(count)]
    return [r for generation in loop.run(requests) for r in generation.rounds]


def test_overlap_is_the_chance_of_acceptance_over_all_drafts() -> None:
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.rand(5, 4, 7, generator=generator).pow(3) for _ in range(2))
    draft, target = (x / x.sum(-1, keepdim=True) for x in (draft, target))
    uniform = torch.rand(5, 4, generator=generator)
    block = (draft[:, :3], target, torch.zeros(5, 3, dtype=torch.long), torch.full((5,), 3), uniform[:, 1:])
    verdict = verify_block(*block, uniform[:, 0], with_overlap=True)
    assert verdict.overlap is not None
    for r in range(5):
        for k in range(3):
            chance = sum(
                float(draft[r, k, x]) * min(1.0, float(target[r, k, x] / draft[r, k, x]))
                for x in range(7)
                if draft[r, k, x] > 0
            )
            assert float(verdict.overlap[r, k]) == pytest.approx(chance, abs=1e-6)
    assert verify_block(*block, uniform[:, 0]).overlap is None


def test_as_many_drafts_pass_as_the_overlaps_say(target: Target) -> None:
    rounds = _rounds(target, 1.0, 400, record_overlap=True)
    for k in range(2):
        reached = [r for r in rounds if r.verified > k and r.accepted >= k]
        rates = np.array([r.overlap[k] for r in reached])
        passed = np.array([r.accepted > k for r in reached])
        noise = np.sqrt((rates * (1 - rates)).sum()) / len(reached)
        assert rates.std() > 0.01  # no constant would do
        assert abs(passed.mean() - rates.mean()) < 3 * noise


def test_recording_changes_nothing_else(target: Target) -> None:
    bare, recorded = _rounds(target, 1.0), _rounds(target, 1.0, record_overlap=True)
    assert all(len(r.overlap) == BLOCK_SIZE for r in recorded)
    assert all(0 < rate <= 1 for r in recorded for rate in r.overlap[: r.verified])
    assert [{**vars(r), "overlap": ()} for r in recorded] == [vars(r) for r in bare]


def test_greedy_rounds_and_rounds_without_a_draft_have_none(target: Target) -> None:
    assert {r.overlap for r in _rounds(target, 0.0, record_overlap=True)} == {()}
    assert {r.overlap for r in _rounds(target, 1.0, record_overlap=True, policy=Fixed(0))} == {()}


def test_observations_keep_overlaps_only_where_every_round_has_them() -> None:
    row = {"confidence": (0.5, 0.4), "accepted": 1, "verified": 2}
    seen = Observations.of_rounds([[{**row, "overlap": (0.9, 0.1)}], [{**row, "overlap": (0.3, 0.2)}]])
    assert seen.overlap is not None
    assert seen.overlap.tolist() == [[0.9, 0.1], [0.3, 0.2]]
    joined = Observations.join([seen, seen])
    assert joined.overlap is not None
    assert joined.overlap.shape == (4, 2)
    bare = Observations.of_rounds([[row], [{**row, "overlap": ()}]])
    assert bare.overlap is None
    assert Observations.join([seen, bare]).overlap is None
