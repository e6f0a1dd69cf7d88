"""How much is to be done for an answer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

AGREEMENT = 1e-4
"""The simulation and the longest known path agree to this part."""
OVERTIME_S = 0.5
"""So many seconds whole numbers are sought at least, once that is begun."""
SHORT, ACTION_S, PART = 100_000, 5e-6, 0.25
"""Schedules of so many actions are always simulated; longer ones, whose actions take so long, in this part of the time left."""


@dataclass(frozen=True)
class Effort:
    """When to stop: a ``target_s`` that nothing above matters to, a ``deadline`` (time.perf_counter), how many paths, the
    relative ``gap`` of whole numbers. ``end``: when whole numbers are given up that are sought at the deadline; what they have
    learned is lost then."""

    target_s: float
    deadline: float
    paths: int = 200
    gap: float = AGREEMENT
    end: float = -math.inf

    @property
    def longer(self) -> Effort:
        """For what is lost where it is broken off: not past the end, but as long as whole numbers are sought at least."""
        return replace(self, deadline=max(self.deadline, min(self.end, time.perf_counter() + OVERTIME_S)))

    def left_s(self, *, whole: bool) -> float:
        """Seconds that a solve which begins now may take."""
        now = time.perf_counter()
        left_s = self.deadline - now
        return max(left_s, min(OVERTIME_S, self.end - now)) if whole and left_s > 0 else left_s


def has_time(actions: int, deadline: float) -> bool:
    """Whether a schedule of so many actions can be simulated a few times before the ``deadline`` (time.perf_counter)."""
    return actions <= SHORT or ACTION_S * actions <= PART * (deadline - time.perf_counter())
