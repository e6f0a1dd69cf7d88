"""What every rank chooses where numbers of blocks are known, all that may be quicker than a target: rank by rank.

To a rank it is the same which of its stages recompute, to a schedule it is not; and neither parts of blocks nor branch and
bound find the way out of many ranks that each choose two of eight. So ranks get their :mod:`ways` one by one, the middle ones
first, and a partial assignment is dropped by either of two bounds. A path is a sum over the ranks: one that is not decided
counts with the least of its ways, which has to recompute as much, wherever. And the schedule is simulated, where a rank that is
not decided has on every stage the quickest of all its ways: that says how the decided ones meet. (16 ranks of 8 stages, 28 ways
each, of Llama 405B: once the best plan is known, 20,000 simulations prove it; without paths it were 340,000.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import lengths, rough_lengths
from planner.search.greedy import Shares
from planner.search.linear import Floats, Indices
from planner.search.paths import Paths
from planner.search.rows import Layout
from planner.search.slowest import between
from planner.search.stream import Stream
from planner.search.tables import INPUT_GRADIENT, PASSES
from planner.search.ways import Ways, ways_of

MOST_ACTIONS = 4_000_000_000
"""Actions times cases that are simulated at most."""
MOST_PATHS = 250
"""Paths that bound partial assignments: those that are longest where every rank has the best of its ways for them."""
TOGETHER, MOMENT = 4_000_000, 60_000_000
"""Numbers of one array, and actions times cases that are simulated at once, about, at most."""
MOST_WAYS = 500
"""Of a rank."""
MOST_IN_VAIN = 12
"""After so many whole assignments that did not lower the target (they fit by the sums of memory, not by its replay), others are
not told of any more: what they say of the bound is all that counts."""
FEW = 1_000
"""Partial assignments that are gone on with at once, at most."""

Told = Callable[["Chosen"], float]
"""Is told of a whole assignment that is quicker than the target; answers with the target from then on."""


@dataclass(frozen=True)
class Chosen:
    """One way for each rank. ``counts`` [ranks, portions, choices]; ``step_s``: T + R."""

    counts: NDArray[np.int64]
    step_s: float

    def values(self, layout: Layout, shares: Shares) -> Floats:
        """As the columns of a leaf's program."""
        values = np.zeros(layout.size)
        values[layout.n_at] = layout.fewest
        for rank, portions in enumerate(shares.portions):
            owned = layout.shape.owned(rank)
            for portion, numbers in zip(portions, self.counts[rank], strict=False):
                on = (layout.stage == owned[portion.slot]) & (layout.kind == portion.kind)
                at = layout.choice_at[on & (layout.pair_run[layout.pair] == portion.run)]
                values[at] = numbers[: len(at)]
        return values


def choices_of(layout: Layout, paths: Paths, before_s: Floats, target_s: float) -> Choices | None:
    """Of a leaf whose stages have ``layout.fewest`` blocks; None where a rank has too many ways. ``before_s`` [ranks]: what the
    first micro-batch takes before a rank's own work, at least."""
    stream, shape = layout.stream, layout.shape
    blocks = np.bincount(layout.pair_stage, layout.fewest, shape.stages).astype(int)
    shares, ways = Shares.of(stream, shape, [0, *np.cumsum(blocks).tolist()]), list[Ways]()
    for rank in range(shape.pipeline):
        found = ways_of(shares, stream, rank, target_s - float(before_s[rank]))
        if found is None:
            return None
        ways.append(found)
    return Choices(shares, stream, ways, paths).narrowed(target_s)


@dataclass
class Choices:
    """The assignments of a leaf that may still be quicker than a target that only falls. ``open``: ranks decided, and which way
    each has [cases, ranks], the longest cases first, negative where it is not decided; those to go on with last."""

    shares: Shares
    stream: Stream
    ways: Sequence[Ways]
    paths: Paths
    open: list[tuple[int, NDArray[np.int64]]] = field(init=False)
    simulated: int = 0
    least_s: float = math.inf
    """Of the whole assignments that were quicker than the target then."""
    _in_vain: int = 0

    def __post_init__(self) -> None:
        begun = np.full((1, len(self.ways)), -1, dtype=np.int64)
        self.open = [(0, begun)] if all(len(each.tails_s) for each in self.ways) else []

    def narrowed(self, target_s: float) -> Choices | None:
        """With the ways that may be part of a step quicker than the target, none that another beats; None where a rank still
        has too many."""
        if not self.open:
            return self
        fixed, parts = self._rows
        least = [part.min(axis=0) for part in parts]
        tails_s = [float(ways.tails_s.min()) for ways in self.ways]
        narrowed = list[Ways]()
        for rank, (ways, part) in enumerate(zip(self.ways, parts, strict=True)):
            longest = (part + (fixed + sum(least) - least[rank])).max(axis=1)
            once_s = np.maximum(ways.tails_s, max(tails_s[:rank] + tails_s[rank + 1 :], default=0.0))
            quick = ways.part(longest + once_s < target_s)
            narrowed.append(quick.without_beaten())
        return replace(self, ways=narrowed) if max(len(ways.tails_s) for ways in narrowed) <= MOST_WAYS else None

    @property
    def too_many(self) -> bool:
        """Whether more were simulated than is worth it."""
        return self.simulated * self.shares.shape.actions > MOST_ACTIONS

    @cached_property
    def order(self) -> list[int]:
        """Ranks as they are decided: a rank's neighbours wait for it most."""
        middle = (len(self.ways) - 1) / 2
        return sorted(range(len(self.ways)), key=lambda rank: (abs(rank - middle), rank))

    @cached_property
    def _rows(self) -> tuple[Floats, list[Floats]]:
        """Lengths of paths: [paths], and of each rank [ways, paths] what it adds."""
        every = np.arange(len(self.paths.all))
        fixed, parts = self._of(every)
        longest = np.argsort(-(fixed + sum(part.min(axis=0) for part in parts)), kind="stable")[:MOST_PATHS]
        slow_s, slow = self._of_slowest()
        return np.append(fixed[longest], slow_s), [
            np.concatenate([part[:, longest], more], axis=1) for part, more in zip(parts, slow, strict=True)
        ]

    def _of(self, places: Indices) -> tuple[Floats, list[Floats]]:
        """Of known paths."""
        counts = self.paths.of_stages(places)
        fixed = counts[:, PASSES].sum(axis=1) * self.stream.send_s
        return fixed, [
            np.einsum("psv,wvs->wp", counts[:, :PASSES, self._owned[rank]], ways.passes_s)
            for rank, ways in enumerate(self.ways)
        ]

    def _of_slowest(self) -> tuple[Floats, list[Floats]]:
        """Of the paths through the slowest stage of every rank (:mod:`slowest`)."""
        shape = self.shares.shape
        through = [ways.passes_s[..., :2] if shape.splits_backward else ways.passes_s for ways in self.ways]
        parts = [np.tile(each.sum(axis=(1, 2))[:, None], (1, shape.pipeline)) for each in through]
        for rank, (path, ways, each) in enumerate(zip(between(shape.timetable), self.ways, through, strict=True)):
            parts[rank][:, rank] += (ways.passes_s * path.shared[self._owned[rank]]).sum(axis=(1, 2))
            parts[rank][:, rank] += path.own * each[..., INPUT_GRADIENT:].sum(axis=2).max(axis=1)
        return np.full(shape.pipeline, 2 * int(shape.crosses.sum()) * self.stream.send_s), parts

    @cached_property
    def _owned(self) -> Indices:
        """[ranks, virtual stages]: which stages each has."""
        return np.array([self.shares.shape.owned(rank) for rank in range(self.shares.shape.pipeline)])

    @cached_property
    def _quickest(self) -> Floats:
        """[stages, 3]: the quickest pass of each stage under any way."""
        times = np.empty((self.shares.shape.stages, PASSES))
        for rank, ways in enumerate(self.ways):
            times[self._owned[rank]] = ways.passes_s.min(axis=0)
        return times

    def go(self, target_s: float, until: Callable[[], bool], told: Told) -> tuple[float, bool]:
        """Decide rank after rank until nothing is left that may be quicker than the target. Returns that, and whether it is so;
        else it was ``until`` that ended it, or there are too many."""
        while self.open:
            if until() or self.too_many:
                return target_s, False
            decided, cases = self.open.pop()
            rank = self.order[decided]
            most = self._at_once(rank)
            if len(cases) > most:
                self.open.append((decided, cases[:-most]))
            found, seconds = self._wider(cases[-most:], rank, target_s)
            if decided + 1 == len(self.order):
                target_s = self._tell(found, target_s, told)
            elif len(found):
                self.open.append((decided + 1, found[np.argsort(-seconds, kind="stable")]))
        return target_s, True

    def _at_once(self, rank: int) -> int:
        """Cases that are given each way of a rank at once: no more than arrays hold, or are simulated in a moment."""
        ways, actions = len(self.ways[rank].tails_s), self.shares.shape.actions
        return max(1, min(FEW, TOGETHER // (ways * len(self._rows[0])), MOMENT // (ways * actions)))

    def _wider(self, cases: NDArray[np.int64], rank: int, target_s: float) -> tuple[NDArray[np.int64], Floats]:
        """The cases with each way of one more rank that may be quicker than the target, and the least seconds of each."""
        paths_s, tails_s = self._sums(cases)
        mine, (_, parts) = self.ways[rank], self._rows
        # Beside the least of the rank's ways, which the sums have.
        longer = (parts[rank] - parts[rank].min(axis=0))[None] + paths_s[:, None]
        later = np.maximum(tails_s[:, None], mine.tails_s)
        case, way = np.nonzero(longer.max(axis=2) + later < target_s)
        found = cases[case]
        found[:, rank] = way
        seconds = self._simulated(found, roughly=True) + later[case, way]
        quick = seconds < target_s
        return found[quick], seconds[quick]

    def _sums(self, cases: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """[cases, paths]: the least lengths of the paths; [cases]: what the slowest rank does once a step, at least."""
        fixed, parts = self._rows
        paths_s, tails_s = np.tile(fixed, (len(cases), 1)), np.zeros(len(cases))
        for rank, (ways, part) in enumerate(zip(self.ways, parts, strict=True)):
            chosen, known = cases[:, rank], bool(cases[0, rank] >= 0)
            paths_s += part[chosen] if known else part.min(axis=0)
            tails_s = np.maximum(tails_s, ways.tails_s[chosen] if known else ways.tails_s.min())
        return paths_s, tails_s

    def _simulated(self, cases: NDArray[np.int64], *, roughly: bool) -> Floats:
        """[cases]: lengths of the pipeline; in half the digits, and never more than they are, where ``roughly``."""
        self.simulated += len(cases)
        times = np.repeat(self._quickest[None], len(cases), axis=0)
        for rank, ways in enumerate(self.ways) if len(cases) else ():
            if cases[0, rank] >= 0:
                times[:, self._owned[rank]] = ways.passes_s[cases[:, rank]]
        return (rough_lengths if roughly else lengths)(*self.shares.shape.timetable, times, self.stream.send_s)

    def _tell(self, found: NDArray[np.int64], target_s: float, told: Told) -> float:
        """Of whole assignments, the quickest first, as long as they are quicker than the target; returns that."""
        seconds = self._simulated(found, roughly=False) + (self._sums(found)[1] if len(found) else 0.0)
        for at in np.argsort(seconds, kind="stable"):
            if seconds[at] >= target_s:
                break
            self.least_s = min(self.least_s, float(seconds[at]))
            if self._in_vain < MOST_IN_VAIN:
                counts = np.stack([ways.counts[way] for ways, way in zip(self.ways, found[at], strict=True)])
                before_s, target_s = target_s, told(Chosen(counts, float(seconds[at])))
                self._in_vain = 0 if target_s < before_s else self._in_vain + 1
        return target_s
