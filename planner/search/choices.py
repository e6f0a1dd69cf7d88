"""What every rank takes, all that may be quicker than a target: rank by rank, each time with what is left to the others.

Parts of blocks say little where ranks have few of them: every rank of an interleaved schedule can be as busy as every other,
and recompute a bit on every stage. Whole, a rank has a few :mod:`ways`. They differ little for the rank itself; for the
schedule it is decisive how they meet. So ranks get their ways one by one, the middle ones first, and behind every decision what
is left to the others is found out: each of their ways is tried alone, where ranks that are not decided have on every stage the
quickest pass of all the ways that are left to them. It is dropped by a path, which is a sum over the ranks, or by simulation.
What is dropped makes those quickest passes longer, which drops more: where ranks work in lockstep, one decision leaves others
next to nothing. (16 ranks of 7 stages of GPT 1T on 98,304 H100: 32,000 simulations prove what took
3,000,000 when only decided ranks were looked at.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import lengths, rough_lengths
from planner.search.crossings import Crossings
from planner.search.greedy import Shares
from planner.search.linear import Floats, Indices
from planner.search.paths import Paths
from planner.search.rows import Layout
from planner.search.slowest import between
from planner.search.stream import Stream
from planner.search.tables import INPUT_GRADIENT, PASSES
from planner.search.ways import Range, Ways, ways_of

MOST_PATHS = 100
"""Paths that bound partial assignments: those that are longest where every rank has the best of its ways for them."""
TOGETHER, MOMENT = 4_000_000, 100_000_000
"""Numbers of one array, and actions times cases that are simulated at once, about, at most."""
MOST_WAYS = 2_500
"""Of a rank."""
MOST_IN_VAIN = 12
"""After so many whole assignments that did not lower the target (they fit by the sums of memory, not by its replay), others are
not told of any more: what they say of the bound is all that counts."""
SURE, MOST_ACTIONS = 0.05, 4_000_000_000
"""Actions times cases that are simulated at most; after this part of them it is asked whether the pace will do."""
AGAIN = 0.7
"""Where no more than this part of the ways is left, what that leaves to others is found out again."""
FEW = 256
"""Partial assignments that are gone on with at once, at most."""

Told = Callable[["Chosen"], float]
"""Is told of a whole assignment that is quicker than the target; answers with the target from then on."""
Left = tuple[NDArray[np.bool_], ...]
"""Of every rank, [cases, ways]: which ways are left to it."""


@dataclass(frozen=True)
class Cases:
    """Partial assignments. ``share`` [cases]: of all that there is to decide, each of a rank's ways being as much of it."""

    left: Left
    share: Floats

    def __len__(self) -> int:
        return len(self.share)

    def part(self, which: NDArray[np.bool_] | Indices | slice) -> Cases:
        return Cases(tuple(each[which] for each in self.left), self.share[which])

    @property
    def ways(self) -> int:
        """That are left to all ranks of all cases."""
        return sum(int(each.sum()) for each in self.left)

    def parted(self, rank: int) -> Cases:
        """With one of the ways that are left to a rank."""
        case, way = np.nonzero(self.left[rank])
        found = [each[case] for each in self.left]
        found[rank] = np.arange(self.left[rank].shape[1]) == way[:, None]
        return Cases(tuple(found), self.share[case] / self.left[rank].sum(axis=1)[case])


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
    blocks = np.bincount(layout.pair_stage, layout.fewest, layout.shape.stages).astype(int)
    shares = Shares.of(layout.stream, layout.shape, [0, *np.cumsum(blocks).tolist()])
    own = [[(portion.blocks, portion.blocks) for portion in mine] for mine in shares.portions]
    sums = [int(blocks[layout.shape.owned(rank)].sum()) for rank in range(layout.shape.pipeline)]
    ranges = list(zip(own, ((each, each) for each in sums), strict=True))
    ways = every_way(shares, layout.stream, ranges, target_s - before_s)
    return None if ways is None else Choices(shares, layout.stream, ways, paths, int(blocks.sum()))


def every_way(
    shares: Shares, stream: Stream, ranges: Sequence[tuple[Sequence[Range], Range]], limits_s: Floats
) -> list[Ways] | None:
    """Of each rank, with so many blocks of its portions, and in all; None where one of them has too many."""
    found = list[Ways]()
    for rank, (own, blocks) in enumerate(ranges):
        ways = ways_of(shares, stream, rank, float(limits_s[rank]), own, blocks)
        if ways is None or len(ways.blocks) > MOST_WAYS:
            return None
        found.append(ways)
    return found


@dataclass(frozen=True)
class _Least:
    """What a rank takes under the least of the ways that are left to it. ``passes_s`` [cases, virtual stages, 3]; ``paths_s``
    [cases, paths]; ``tails_s``, ``fewest``, ``most`` [cases]: seconds once a step, and blocks."""

    passes_s: Floats
    paths_s: Floats
    tails_s: Floats
    fewest: Indices
    most: Indices

    def part(self, which: NDArray[np.bool_]) -> _Least:
        return _Least(
            self.passes_s[which], self.paths_s[which], self.tails_s[which], self.fewest[which], self.most[which]
        )


@dataclass
class Choices:
    """The assignments of a chain that may still be quicker than a target that only falls; ranks have ``blocks`` together.
    ``open``: partial ones, each followed by what is more promising."""

    shares: Shares
    stream: Stream
    ways: Sequence[Ways]
    paths: Paths
    blocks: int
    most_actions: int = MOST_ACTIONS
    open: list[Cases] = field(init=False)
    simulated: int = 0
    least_s: float = math.inf
    """Of the whole assignments that were quicker than the target then."""
    _in_vain: int = 0
    _at_first: int = 0
    """Simulated before anything was decided."""

    def __post_init__(self) -> None:
        begun = tuple(np.ones((1, len(each.tails_s)), dtype=bool) for each in self.ways)
        self.open = [Cases(begun, np.ones(1))] if all(map(np.size, begun)) else []

    @property
    def too_many(self) -> bool:
        """Whether more were simulated than is worth it, or will be at this pace."""
        actions, done = self.shares.shape.actions, 1.0 - sum(float(cases.share.sum()) for cases in self.open)
        spent = actions * (self.simulated - self._at_first)
        late = spent > SURE * self.most_actions and spent > self.most_actions * done
        return late or actions * self.simulated > self.most_actions

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
        fixed = counts[:, PASSES] @ self._crossings.sends_s
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
        return np.full(shape.pipeline, self._crossings.both_ways_s), parts

    @cached_property
    def _crossings(self) -> Crossings:
        return self.stream.crossings(self.shares.shape, self.shares.bounds)

    @cached_property
    def _owned(self) -> Indices:
        """[ranks, virtual stages]: which stages each has."""
        return np.array([self.shares.shape.owned(rank) for rank in range(self.shares.shape.pipeline)])

    def go(self, target_s: float, until: Callable[[], bool], told: Told) -> tuple[float, bool]:
        """Decide rank after rank until nothing is left that may be quicker than the target. Returns that, and whether it is so;
        else it was ``until`` that ended it, or there are too many."""
        while self.open:
            if until() or self.too_many:
                return target_s, False
            cases = self.open.pop()
            most = self._at_once(cases)
            if len(cases) > most:
                self.open.append(cases.part(slice(None, -most)))
                cases = cases.part(slice(-most, None))
            left = self._narrowed(cases, target_s)
            while left.ways < AGAIN * cases.ways:
                cases, left = left, self._narrowed(left, target_s)
            self._at_first = self._at_first or self.simulated
            left = self._wanted(left)
            rank = next((rank for rank in self.order if (left.left[rank].sum(axis=1) > 1).any()), None)
            if rank is None:
                target_s = self._tell(np.stack([each.argmax(axis=1) for each in left.left], axis=1), target_s, told)
            else:
                self._push(left.parted(rank), target_s)
        return target_s, True

    def _wanted(self, cases: Cases) -> Cases:
        """The cases that are gone on with."""
        return cases

    def _at_once(self, cases: Cases) -> int:
        """Cases of which each way of each rank is tried at once: no more than are simulated in a moment."""
        tried = sum(float(each.sum(axis=1).mean()) for each in cases.left)
        return max(1, min(FEW, int(MOMENT / (tried * self.shares.shape.actions))))

    def _push(self, cases: Cases, target_s: float) -> None:
        """Keep the cases that may be quicker than the target, the quickest last."""
        least = [self._least(rank, each) for rank, each in enumerate(cases.left)]
        paths_s = self._rows[0] + sum(each.paths_s for each in least)
        later = np.max([each.tails_s for each in least], axis=0)
        kept = np.flatnonzero(paths_s.max(axis=1) + later < target_s)
        seconds = self._simulated(self._times(least)[kept], roughly=True) + later[kept]
        order = np.argsort(-seconds, kind="stable")
        kept = kept[order[seconds[order] < target_s]]
        if len(kept):
            self.open.append(cases.part(kept))

    def _narrowed(self, cases: Cases, target_s: float) -> Cases:
        """The cases in which something is left to every rank, each with what may be part of a step quicker than the target."""
        left, least = list(cases.left), [self._least(rank, each) for rank, each in enumerate(cases.left)]
        share = cases.share
        for rank in range(len(left)):
            left[rank] = self._possible(rank, left[rank], least, target_s)
            there = np.asarray(left[rank].any(axis=1))
            if not there.all():
                left, least, share = [each[there] for each in left], [each.part(there) for each in least], share[there]
            least[rank] = self._least(rank, left[rank])
        return Cases(tuple(left), share)

    def _possible(self, rank: int, mine: NDArray[np.bool_], least: Sequence[_Least], target_s: float) -> NDArray[np.bool_]:
        """[cases, ways]: those of the ``mine`` that a rank may have beside the least of all others."""
        ways, (fixed, parts), own = self.ways[rank], self._rows, least[rank]
        fewest, most = (np.sum(part, axis=0) for part in zip(*((each.fewest, each.most) for each in least), strict=True))
        few, many = (fewest - own.fewest)[:, None], (most - own.most)[:, None]
        mine = mine & (ways.blocks + few <= self.blocks) & (self.blocks <= ways.blocks + many)
        several = mine.sum(axis=1) > 1
        paths_s = fixed + sum(each.paths_s for each in least) - own.paths_s
        tails_s = np.max([each.tails_s for each in least], axis=0)
        times = self._times(least)
        for case, way in _pieces(mine, TOGETHER // len(fixed)):
            later = np.maximum(tails_s[case], ways.tails_s[way])
            quick = (paths_s[case] + parts[rank][way]).max(axis=1) + later < target_s
            mine[case[~quick], way[~quick]] = False
        for case, way in _pieces(mine & several[:, None], max(1, MOMENT // self.shares.shape.actions)):
            tried = times[case]
            tried[:, self._owned[rank]] = ways.passes_s[way]
            later = np.maximum(tails_s[case], ways.tails_s[way])
            slow = self._simulated(tried, roughly=True) + later >= target_s
            mine[case[slow], way[slow]] = False
        return mine

    def _least(self, rank: int, left: NDArray[np.bool_]) -> _Least:
        """Of a rank; many cases leave it the same ways."""
        ways, parts = self.ways[rank], self._rows[1][rank]
        first, at = _distinct(left)
        rows = [np.flatnonzero(left[case]) for case in first]
        columns = [
            np.array([op(part[row], axis=0) for row in rows]).reshape(len(rows), *part.shape[1:])[at]
            for part, op in (
                (ways.passes_s, np.min), (parts, np.min), (ways.tails_s, np.min), (ways.blocks, np.min), (ways.blocks, np.max)
            )
        ]
        return _Least(*columns)

    def _times(self, least: Sequence[_Least]) -> Floats:
        """[cases, virtual stages, 3]: seconds of the passes."""
        times = np.empty((len(least[0].tails_s), self.shares.shape.stages, PASSES))
        for owned, each in zip(self._owned, least, strict=True):
            times[:, owned] = each.passes_s
        return times

    def _simulated(self, times: Floats, *, roughly: bool) -> Floats:
        """[cases]: lengths of the pipeline; in half the digits, and never more than they are, where ``roughly``."""
        self.simulated += len(times)
        return (rough_lengths if roughly else lengths)(*self.shares.shape.timetable, times, self._crossings.sends_s)

    def _steps(self, found: NDArray[np.int64]) -> Floats:
        """[cases]: T + R of whole assignments [cases, ranks]."""
        times, tails_s = np.empty((len(found), self.shares.shape.stages, PASSES)), np.zeros(len(found))
        for owned, ways, way in zip(self._owned, self.ways, found.T, strict=True):
            times[:, owned], tails_s = ways.passes_s[way], np.maximum(tails_s, ways.tails_s[way])
        return np.asarray(self._simulated(times, roughly=False) + tails_s)

    def _tell(self, found: NDArray[np.int64], target_s: float, told: Told) -> float:
        """Of whole assignments [cases, ranks], the quickest first, those that are quicker than the target; returns that."""
        seconds = self._steps(found)
        for at in np.argsort(seconds, kind="stable"):
            if seconds[at] >= target_s:
                break
            self.least_s = min(self.least_s, float(seconds[at]))
            if self._in_vain < MOST_IN_VAIN:
                counts = np.stack([ways.counts[way] for ways, way in zip(self.ways, found[at], strict=True)])
                before_s, target_s = target_s, told(Chosen(counts, float(seconds[at])))
                self._in_vain = 0 if target_s < before_s else self._in_vain + 1
        return target_s


def _distinct(left: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """The first of each kind of rows, and by row its kind."""
    packed = np.packbits(left, axis=1)
    width, data = packed.shape[1], packed.tobytes()
    kinds: dict[bytes, int] = {}
    first, at = list[int](), list[int]()
    for case in range(len(left)):
        kind = kinds.setdefault(data[case * width : (case + 1) * width], len(kinds))
        if kind == len(first):
            first.append(case)
        at.append(kind)
    return first, at


def _pieces(left: NDArray[np.bool_], most: int) -> Iterator[tuple[Indices, Indices]]:
    """Pairs of a case and a way that is left to it, so many at a time."""
    case, way = np.nonzero(left)
    for first in range(0, len(case), most):
        yield case[first : first + most], way[first : first + most]
