"""Device and host meet once a round: nothing in it depends on a value of a device tensor until the verdict is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_exp.decoding import DecodingBatch, Fixed, Full, Request, Sampling, Threshold
from dspark_exp.scheduling import AsyncScheduler, CapacityCurve
from dspark_exp.targets import Target
from tests.conftest import make_cache, make_drafter

_WAITS = (
    "aten.nonzero",
    "aten._local_scalar_dense",
    "aten.masked_select",
    "aten.is_nonzero",
    "aten.equal",
    "aten.unique",
)
_CHEAP = CapacityCurve(np.array([1.0, 99.0]), np.array([1.0, 1.0]))  # a token more costs nothing
_DEAR = CapacityCurve(np.array([1.0, 3.0, 6.0, 99.0]), np.array([1.0, 1.0, 1.5, 90.0]))


class _Waits(TorchDispatchMode):
    """Operators whose result or shape a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = name.startswith(("aten.index.", "aten.index_put")) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name.startswith(_WAITS) or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "policy", "reads"),  # in two rounds
    [
        (None, Full(), 2),
        ("dflash", Full(), 2),
        ("dspark_markov", Fixed(2), 2),
        ("dspark_rnn", Full(), 2),
        ("eagle3", Full(), 2),
        ("dspark_markov", Threshold(0.45), 4),  # lengths that follow this round's confidence
        ("dspark_markov", AsyncScheduler(_CHEAP, margin=0.9), 2),  # everything is verified: there is nothing to rank
        ("dspark_markov", AsyncScheduler(_DEAR, staleness=1, margin=0.0), 3),  # the second round ranks
    ],
)
def test_a_round_reads_the_device_once(
    target: Target,
    kind: str | None,
    policy: Any,
    reads: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = None if kind is None else make_drafter(kind, target)
    batch = DecodingBatch(target, drafter, make_cache, Sampling(temperature, top_p=0.9), policy, 3, 60)
    batch.enter([(i, Request([3 + i, 4], 30, seed=i)) for i in range(3)])
    copies: list[str] = []
    for name in ("cpu", "tolist", "item"):
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
            copies.append(_name)
            return _original(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with _Waits() as waits:
        for _ in range(2):
            batch.round()
    assert waits.seen == []
    assert copies == ["cpu"] * reads
