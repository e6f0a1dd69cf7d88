"""What crosses the cuts between virtual stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.search.linear import Floats, Indices
from planner.search.shape import Shape


class Send(NamedTuple):
    """Seconds of a transfer over a cut between ranks: by which it delays what waits for it (``behind_s``), and for which both
    ranks stop (``stopped_s``)."""

    behind_s: float
    stopped_s: float


NO_SEND = Send(0.0, 0.0)


@dataclass(frozen=True)
class Crossings:
    """Of every cut, first to last: a transfer over it, its bytes, and of these what the block behind the cut keeps in any
    case."""

    shape: Shape
    each: Sequence[tuple[Send, int, int]]

    @cached_property
    def sends_s(self) -> Floats:
        """[stages]: seconds by which a transfer over the cut before a stage delays what waits for it."""
        return np.array([0.0, *(send.behind_s for send, _, _ in self.each)])

    @property
    def both_ways_s(self) -> float:
        """Seconds of transfers over all cuts, there and back."""
        return 2 * float(self.sends_s[self.shape.crosses[:-1]].sum())

    @cached_property
    def stopped_s(self) -> Floats:
        """[stages]: seconds for which a pass of a stage stops both ranks at its cuts: it receives over one and sends over the
        other in a call that moves both ways at once (:func:`planner.evaluate.traffic.blocked_times`)."""
        seconds = np.array([0.0, *(send.stopped_s for send, _, _ in self.each), 0.0]) * self.shape.crosses
        return np.asarray((seconds[:-1] + seconds[1:]) / 2)

    @cached_property
    def size_bytes(self) -> Indices:
        """[stages + 1]: over the cut before each stage, also inside a rank; nothing at the ends."""
        return np.array([0, *(size for _, size, _ in self.each), 0])

    @cached_property
    def sent_bytes(self) -> Sequence[int]:
        """[stages + 1]: the same, between ranks only."""
        return list(map(int, self.size_bytes * self.shape.crosses))

    @cached_property
    def received_bytes(self) -> Indices:
        """[stages]: of what crosses the cut before it, what a stage keeps anyway."""
        return np.array([0, *(received for _, _, received in self.each)])
