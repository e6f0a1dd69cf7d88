"""Which stages of a rank had better be the slow ones.

To a rank it is the same on which of its virtual stages it recomputes or gathers, as long as it fits; to a schedule it is not:
backward passes of the first stages come last, when ranks wait for each other. So where a filled rank takes different choices
for blocks of one run, blocks change places, many of them simulated at once, as long as that makes the pipeline shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cost_models.pipeline import lengths
from planner.search.greedy import Numbers, Shares
from planner.search.linear import Floats
from planner.search.stream import Stream

MOST_ACTIONS = 60_000_000
"""Actions times cases that are simulated at most."""
SHORTER = 1e-6
"""A change that gains less than this part is none."""


@dataclass
class Polish:
    """``counts`` [ranks, portions, choices]: what the ranks take, by how they are now; ``step_s``: the length of the pipeline
    then, and what the slowest rank does once a step."""

    shares: Shares
    stream: Stream
    counts: Numbers
    _step_s: float | None = field(init=False, default=None)
    _times: Floats = field(init=False)
    _tails: Floats = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shares.shape
        self._left = MOST_ACTIONS // shape.actions
        self._owned = np.array([shape.owned(rank) for rank in range(shape.pipeline)])
        self._times = np.empty((shape.stages, 3))
        self._times[self._owned], self._tails = self.shares.seconds(self.stream, self.counts, np.arange(shape.pipeline))

    @staticmethod
    def simulate(several: Sequence[Polish]) -> None:
        """Find out the step of several of one shape at once."""
        if several:
            sends_s = np.stack([each._sends_s for each in several])
            lengths_s = several[0]._lengths(np.stack([each._times for each in several]), sends_s)
            for each, length_s in zip(several, lengths_s.tolist(), strict=True):
                each._step_s = length_s + float(each._tails.max())

    @property
    def step_s(self) -> float:
        if self._step_s is None:
            self.simulate([self])
        assert self._step_s is not None
        return self._step_s

    def go(self) -> None:
        """Change places until no change makes the step shorter, or too many were tried."""
        while self._round():
            pass

    def _round(self) -> bool:
        """The best change of every rank by itself: all of those that help at once, where that is better than the best alone.
        Whether there was any."""
        changes = [self._changes(rank) for rank in range(self.shares.shape.pipeline)]
        counts, ranks = np.concatenate(changes), np.repeat(np.arange(len(changes)), [len(each) for each in changes])
        fits = self.shares.excess(counts, ranks) <= 0 if len(counts) else np.zeros(0, dtype=bool)
        counts, ranks = counts[fits], ranks[fits]
        if not 0 < len(counts) <= self._left:
            return False
        self._left -= len(counts)
        (passes, tails), cases = self.shares.seconds(self.stream, counts, ranks), np.arange(len(counts))
        times = np.repeat(self._times[None], len(counts), axis=0)
        times[cases[:, None], self._owned[ranks]] = passes
        others = np.array([np.delete(self._tails, rank).max(initial=0.0) for rank in range(len(self._tails))])
        seconds = self._lengths(times, self._sends_s) + np.maximum(tails, others[ranks])
        order = np.argsort(seconds, kind="stable")
        order = order[seconds[order] < self.step_s * (1 - SHORTER)]
        if not len(order):
            return False
        for helping in (order[np.unique(ranks[order], return_index=True)[1]], order[:1]):
            times, tails_s = self._times.copy(), self._tails.copy()
            times[self._owned[ranks[helping]]], tails_s[ranks[helping]] = passes[helping], tails[helping]
            step_s = float(self._lengths(times[None], self._sends_s)[0] + tails_s.max())
            if step_s <= seconds[order[0]]:
                break
        self.counts[ranks[helping]] = counts[helping]
        self._times, self._tails, self._step_s = times, tails_s, step_s
        return True

    def _changes(self, rank: int) -> Numbers:
        """[changes, portions, choices]: a block of one stage takes another's choice and the other way round, or a quicker one
        where there may be room for it."""
        found, now, cost = [], self.counts[rank], self.shares.cost_s[rank]
        alike: dict[tuple[int, int], list[int]] = {}
        for at, portion in enumerate(self.shares.portions[rank]):
            alike.setdefault((portion.run, portion.kind), []).append(at)
        for members in alike.values():
            for one in members:
                for slow in np.flatnonzero(now[one]):
                    for quick in np.flatnonzero(cost[one] < cost[one, slow]):
                        changed = now.copy()
                        changed[one, [slow, quick]] += (-1, 1)
                        found.append(changed)
                        for other in members:
                            if other != one and now[other, quick]:
                                swapped = changed.copy()
                                swapped[other, [slow, quick]] += (1, -1)
                                found.append(swapped)
        return np.array(found, dtype=np.int64).reshape(-1, *now.shape)

    @cached_property
    def _sends_s(self) -> Floats:
        return self.stream.crossings(self.shares.shape, self.shares.bounds).sends_s

    def _lengths(self, times: Floats, sends_s: Floats) -> Floats:
        return lengths(*self.shares.shape.timetable, times, sends_s)
