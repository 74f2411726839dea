"""Passes of ranks in step: those that share a target's weights must make every pass together. Knows no model."""

from __future__ import annotations

import torch
from torch import distributed


class Pace:
    """Keeps the passes of all ranks in step. A rank announces each of its own; one without work asks for the others'.

    Every announcement is one sum over ranks, of a number on the host, before the pass.
    """

    def announce(self) -> None:
        """Before a pass of this rank's own."""
        self._num_working(1)

    def others_go_on(self) -> bool:
        """Whether another rank has a pass now, which this one must take part in."""
        return self._num_working(0) > 0

    def _num_working(self, own: int) -> int:
        count = torch.tensor(own)
        distributed.all_reduce(count)
        return int(count)
