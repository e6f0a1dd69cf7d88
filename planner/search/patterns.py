"""How many blocks every virtual stage has, all ways that may be quicker than a target: rank by rank, by simulation.

With fractions of blocks every rank of an interleaved schedule can be as busy as every other; with whole ones it cannot, and
what that costs no sum of a rank tells: stages of two blocks and of one meet in the schedule, and ranks wait for each other. A
schedule's length grows with every stage's time, so stages that are not decided count with the fewest blocks that they can
have, and a partial assignment is dropped when its simulation is past the target. Many are simulated at once.

Only chains of one long run are told apart so, with at most one block before it and one after it: most models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import lengths, rough_lengths
from planner.search.counted import Ranks
from planner.search.crossings import Crossings
from planner.search.linear import Floats, Indices
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.tables import ONCE, OPTIMIZER, PASSES
from planner.search.together import RankCosts

MOST_ACTIONS, MOST_CASES = 110_000_000, 50_000
"""Actions times cases, and cases, that one enumeration simulates at most. Where ranks can have more blocks than there are,
a part of that: there are many ways then, and seldom few that are left."""
GROWTH = 4
"""So many times as many cases are simulated before a rank is laid whole."""
MOST_WAYS = 4_000
"""Ranks whose blocks can lie on their stages in more ways are not told apart: there are too many together."""


@dataclass(frozen=True)
class Assignments:
    """``counts`` [cases, virtual stages]: blocks of the long run on each stage; ``seconds`` [cases]: no plan with these
    counts is quicker (the once-a-step part included)."""

    counts: NDArray[np.int64]
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Once:
    """What a block does once a step: under the choice whose passes are ``quickest_s``, at least (``least_s``), and the most
    seconds of the one that a second more of its passes saves (``rate``)."""

    quickest_s: float
    least_s: float
    rate: float


@dataclass(frozen=True)
class Patterns:
    """The assignments of a chain."""

    ranks: Ranks

    @property
    def stream(self) -> Stream:
        return self.ranks.stream

    @property
    def shape(self) -> Shape:
        return self.ranks.shape

    @property
    def possible(self) -> bool:
        """Whether the chain is one long run between single blocks, and there is something to tell apart."""
        return self._long is not None and self.shape.pipeline > 1

    @cached_property
    def _long(self) -> int | None:
        counts = [run.count for run in self.stream.runs]
        long = int(np.argmax(counts))
        before, after = counts[:long], counts[long + 1 :]
        return long if counts[long] > 1 and before in ([], [1]) and after in ([], [1]) else None

    @cached_property
    def _ends(self) -> tuple[bool, bool]:
        """Whether a single block comes before the run, and after it."""
        assert self._long is not None
        return self._long > 0, self._long < len(self.stream.runs) - 1

    @cached_property
    def fewest(self) -> Indices:
        """[stages]: the fewest blocks of the run, one on every stage that has nothing else."""
        fewest = np.ones(self.shape.stages, dtype=np.int64)
        fewest[0] -= self._ends[0]
        fewest[-1] -= self._ends[1]
        return np.maximum(fewest, 0)

    def is_long(self, run: int) -> bool:
        """Whether it is the run that is laid, none of the single blocks."""
        return run == self._long

    @cached_property
    def spread(self) -> Stream:
        """The stream with one block of the run on every stage (:attr:`bounds`), beside the single blocks, whatever number it is
        that belongs there; what lies around the blocks, at least."""
        stream, before = self.stream, int(self._ends[0])
        counts = [self.shape.stages if self.is_long(run) else 1 for run in range(len(stream.runs))]
        firsts = [run if run <= before else before + self.shape.stages for run in range(len(counts))]
        return replace(stream, sends=(stream.send,) * len(stream.runs), runs=tuple(
            replace(
                run, first=first, count=count, crossing_bytes=stream.crossing_bytes, received_bytes=stream.received_bytes
            )
            for run, first, count in zip(stream.runs, firsts, counts, strict=True)
        ))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Of the stages of that."""
        before, after = map(int, self._ends)
        stages = self.shape.stages
        return (0, *range(before + 1, before + stages), before + stages + after)

    def ranges(self, costs: RankCosts, target_s: float) -> list[tuple[int, int]]:
        """Of each rank, the fewest blocks of the run and the most that it can have in a step quicker than the target."""
        run = self._long
        assert run is not None
        most = costs.most(run, target_s)
        spare = int(most.sum()) - self.stream.runs[run].count
        return [(max(int(each) - spare, 0), int(each)) for each in most]

    @cached_property
    def _least(self) -> Floats:
        """[runs, 3]: seconds of one block's passes for one micro-batch, at least."""
        floor, rows = self.stream.gathers.floor, []
        for compute, traffic in self.stream.single:
            waits = floor * traffic.sums[:, :PASSES].min(axis=0)
            forward = compute.sums[:, 0].min() + waits[0]
            whole = compute.sums[:, 1:PASSES].sum(axis=1).min() + waits[1]
            weight = compute.sums[:, 2].min() if self.shape.splits_backward else 0.0
            # What is not certainly the weight part's counts with the input part; both where they are one action.
            given = compute.sums[:, 1].min() + waits[1] if self.shape.splits_backward else whole
            rows.append((forward, given, weight))
        return np.array(rows)

    @cached_property
    def _once(self) -> list[Once]:
        """Of one block of each run."""
        stream, microbatches = self.stream, self.shape.microbatches
        found = []
        for _, traffic in stream.single:
            once = stream.gradients.floor * traffic.sums[:, ONCE] + traffic.sums[:, OPTIMIZER]
            passes = microbatches * stream.gathers.floor * traffic.sums[:, :PASSES].sum(axis=1)
            first = int(np.lexsort((once, passes))[0])
            saved, more = once[first] - once, passes + once - passes[first] - once[first]
            rates = [s / m if m > 0 else math.inf for s, m in zip(saved, more, strict=True) if s > 0]
            found.append(Once(float(once[first]), float(once.min()), max(rates, default=0.0)))
        return found

    def seconds(
        self, counts: NDArray[np.int64], target_s: float = math.inf, at_least: NDArray[np.int64] | None = None, *,
        roughly: bool = False,
    ) -> Floats:
        """[cases]: the least step with these numbers of blocks, or more, of plans that are quicker than the target.
        ``at_least``: blocks of the run that each rank has anyway. ``roughly``: in half the digits, never more than it is."""
        shape = self.shape
        assert self._long is not None
        blocks = np.stack([counts[:, shape.ranks == rank].sum(axis=1) for rank in range(shape.pipeline)], axis=1)
        if at_least is not None:
            blocks = np.maximum(blocks, at_least)
        return np.asarray(self._simulated(counts, roughly=roughly) + self._tails(blocks, target_s).max(axis=1))

    def _tails(self, blocks: NDArray[np.int64], target_s: float) -> Floats:
        """[cases, ranks]: seconds once a step with so many blocks of the run on each rank. A ZeRO stage that has less to do
        once a step has more with every micro-batch, for which a rank has what its least work leaves it until the target."""
        run = self._long
        assert run is not None
        held = [blocks if at == run else np.zeros_like(blocks) for at in range(len(self.stream.runs))]
        if self._ends[0]:
            held[0][:, self.shape.ranks[0]] += 1
        if self._ends[1]:
            held[-1][:, self.shape.ranks[-1]] += 1
        pairs = list(zip(held, self._once, strict=True))
        quickest, least = sum(part * once.quickest_s for part, once in pairs), sum(part * once.least_s for part, once in pairs)
        left = np.maximum(target_s - self.ranks.least_s(run, blocks), 0.0)
        rate = max(once.rate for once in self._once)
        with np.errstate(invalid="ignore"):
            given = np.nan_to_num(rate * left, nan=0.0, posinf=math.inf)
        return np.asarray(np.maximum(least, quickest - given))

    @cached_property
    def _crossings(self) -> Crossings:
        """The least that can be, wherever the cuts are."""
        return self.stream.crossings(self.shape)

    def _simulated(self, counts: NDArray[np.int64], *, roughly: bool) -> Floats:
        stream, shape = self.stream, self.shape
        assert self._long is not None
        times = counts[:, :, None] * self._least[self._long]
        if self._ends[0]:
            times[:, 0] += self._least[0]
        if self._ends[1]:
            times[:, -1] += self._least[-1]
        times[:, :, 0] += stream.context_s
        times[:, :, :2] += self._crossings.stopped_s[:, None]
        return (rough_lengths if roughly else lengths)(*shape.timetable, times, self._crossings.sends_s)

    def even(self) -> NDArray[np.int64]:
        """[cases, virtual stages]: ranks as equal as whole blocks allow, and as their least steps allow; what a rank has beside
        an equal number on each of its stages on neighbouring ones, for every choice of the first. Where ranks cannot be equal,
        the last one and then the first ones have fewer."""
        shape, run = self.shape, self._long
        assert run is not None
        total, fewest = self.stream.runs[run].count, np.bincount(shape.ranks, self.fewest).astype(np.int64)
        each, rest = divmod(total - int(fewest.sum()), shape.pipeline)
        ranks = np.arange(shape.pipeline)
        # The last rank has the loss, the first one most micro-batches alive.
        equal = each + ((shape.pipeline - rest - 1 <= ranks) & (ranks < shape.pipeline - 1))
        seconds = self.ranks.costs.seconds[run]
        quickest = np.argsort(seconds, axis=None, kind="stable")[:total] // seconds.shape[1]
        balanced = np.bincount(quickest, minlength=shape.pipeline) - fewest
        shared = [more for more in (equal, balanced) if (more >= 0).all()]
        return np.unique(np.concatenate([self._spread(more) for more in shared]), axis=0)

    def _spread(self, more: NDArray[np.int64]) -> NDArray[np.int64]:
        """[cases, virtual stages]: so many blocks more than the fewest on each rank."""
        shape, cases = self.shape, []
        for first in range(shape.virtual):
            counts = self.fewest.copy()
            for rank, extra in enumerate(more.tolist()):
                owned, (all_over, left) = np.array(shape.owned(rank)), divmod(extra, shape.virtual)
                counts[owned] += all_over
                counts[owned[(first + np.arange(left)) % shape.virtual]] += 1
            cases.append(counts)
        return np.array(cases)

    def by_run(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """[runs, virtual stages]: blocks of every run."""
        assert self._long is not None
        whole = np.zeros((len(self.stream.runs), len(counts)), dtype=np.int64)
        whole[0, 0] = whole[-1, -1] = 1
        whole[self._long] = counts
        return whole

    def cuts(self, counts: NDArray[np.int64]) -> tuple[int, ...]:
        """Bounds of the stages that have these numbers of blocks."""
        return (0, *map(int, np.cumsum(self.by_run(counts).sum(axis=0))))

    def counts_of(self, cuts: Sequence[int]) -> NDArray[np.int64]:
        """Blocks of the run on each stage between these bounds."""
        counts = np.diff(np.array(cuts))
        counts[0] -= self._ends[0]
        counts[-1] -= self._ends[1]
        return counts

    def may_be_quicker(self, counts: NDArray[np.int64], target_s: float) -> NDArray[np.bool_]:
        """[cases]: whether a step with these numbers of blocks [cases, virtual stages] may be quicker than the target."""
        run, shape = self._long, self.shape
        assert run is not None
        quicker = np.asarray(self.seconds(counts, target_s) < target_s)
        for rank in range(shape.pipeline):
            mine = np.flatnonzero(quicker)
            if mine.size:
                quicker[mine] = self.ranks.laid_s(run, rank, counts[mine][:, shape.owned(rank)]) < target_s
        return quicker

    def find(self, costs: RankCosts, target_s: float) -> Assignments | None:
        """All that may be quicker than the target, None where they are too many to tell apart; ``costs`` say how many blocks a
        rank has at most by then."""
        shape, run = self.shape, self._long
        assert run is not None
        total, most = self.stream.runs[run].count, costs.most(run, target_s)
        spare = int(most.sum()) - total
        left = min(MOST_CASES, MOST_ACTIONS // (3 * shape.stages * shape.microbatches) // (1 + max(spare, 0)))
        looked = _Looked(self, target_s, most - spare, left)
        cases = _Cases(self.fewest[None, :], np.zeros(1, dtype=np.int64))
        # From the last stage's rank on: all micro-batches turn round there, so what is decided counts at once.
        order = range(shape.pipeline) if shape.ranks[-1] == 0 else range(shape.pipeline - 1, -1, -1)
        for rank in order if spare >= 0 else ():
            ways = _ways(self.fewest[shape.owned(rank)], int(most[rank]) - spare, int(most[rank]))
            if ways is None:
                return None
            ways = ways[self.ranks.laid_s(run, rank, ways) < target_s]
            found = self._laid(looked, cases, rank, ways, int(most[rank]), spare)
            if found is None:
                return None
            cases = found
        cases = cases.part(cases.counts.sum(axis=1) == total)
        seconds = self.seconds(cases.counts, target_s)
        return Assignments(cases.counts[seconds < target_s], seconds[seconds < target_s])

    def _laid(
        self, looked: _Looked, cases: _Cases, rank: int, ways: NDArray[np.int64], most: int, spare: int
    ) -> _Cases | None:
        """The cases with a rank's blocks in any of the ``ways``, as far as they may be quicker than the target; None where they
        are too many. Stage by stage from the last one, each with as many blocks as it can have for itself beside the
        ranks that are decided: where both work on the same micro-batches, one waits for the other."""
        owned, before, most_each = self.shape.owned(rank), len(cases.counts), ways.max(axis=0, initial=0)
        alone = before <= 1
        caps = np.tile(most_each, (before, 1)) if alone else self._caps(looked, cases.counts, owned, most_each)
        if caps is None:
            return None
        origin, node = np.arange(before), np.zeros(before, dtype=np.int64)
        for at, level in zip(range(len(owned) - 1, -1, -1), _tree(ways), strict=True):
            rows, node = level.of(node)
            if len(rows) > looked.left:
                return None
            cases, origin = cases.part(rows), origin[rows]
            cases.counts[:, owned[at]] = level.values[node]
            laid = cases.counts[:, owned[at:]].sum(axis=1) + caps[origin, :at].sum(axis=1)
            kept = (level.values[node] <= caps[origin, at]) & (most - laid + cases.missed <= spare)
            cases, origin, node = cases.part(kept), origin[kept], node[kept]
            if not alone and len(cases.counts) > GROWTH * before and at:
                kept = looked.quick(cases.counts)
                cases, origin, node, before = cases.part(kept), origin[kept], node[kept], int(kept.sum())
        cases = _Cases(cases.counts, cases.missed + most - cases.counts[:, owned].sum(axis=1))
        # A rank that can only be one way tells no cases apart.
        return cases.part(looked.quick(cases.counts)) if len(ways) > 1 else cases

    def _caps(
        self, looked: _Looked, counts: NDArray[np.int64], owned: Sequence[int], most: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """[cases, stages]: the most blocks of each of a rank's stages, all others not decided as few as they can be."""
        fewest, stages = self.fewest[owned], np.array(owned)
        caps = np.tile(fewest, (len(counts), 1))
        growing = np.ones(caps.shape, dtype=bool)
        for count in range(int(fewest.min()) + 1, int(most.max(initial=0)) + 1):
            case, at = np.nonzero(growing & (fewest < count) & (count <= most))
            if len(case) > looked.left:
                return None
            tried = counts[case]
            tried[np.arange(len(case)), stages[at]] = count
            quick = looked.quick(tried)
            caps[case[quick], at[quick]] = count
            growing[case[~quick], at[~quick]] = False
        return caps


@dataclass(frozen=True)
class _Cases:
    """``counts`` [cases, virtual stages]; ``missed`` [cases]: blocks that the decided ranks have less than they can."""

    counts: NDArray[np.int64]
    missed: NDArray[np.int64]

    def part(self, which: NDArray[np.bool_] | Indices) -> _Cases:
        return _Cases(self.counts[which], self.missed[which])


@dataclass
class _Looked:
    """How many more cases may be simulated (``left``), with at least so many blocks on each rank."""

    patterns: Patterns
    target_s: float
    at_least: NDArray[np.int64]
    left: int

    def quick(self, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[cases]: whether a step may be quicker than the target."""
        self.left -= len(counts)
        return np.asarray(self.patterns.seconds(counts, self.target_s, self.at_least, roughly=True) < self.target_s)


def _ways(fewest: Indices, least: int, most: int) -> NDArray[np.int64] | None:
    """[ways, stages]: how stages that have at least ``fewest`` blocks each can have ``least`` to ``most`` in all; None where
    there are more than :data:`MOST_WAYS`."""
    begins, stages = int(fewest.sum()), len(fewest)
    extras = range(max(least - begins, 0), most - begins + 1)
    if sum(comb(extra + stages - 1, stages - 1) for extra in extras) > MOST_WAYS:
        return None
    ways = [fewest + np.array(parts) for extra in extras for parts in _sums(extra, stages)]
    return np.array(ways, dtype=np.int64).reshape(len(ways), stages)


def _sums(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a number as an ordered sum."""
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total, -1, -1) for rest in _sums(total - first, parts - 1)]


@dataclass(frozen=True)
class _Level:
    """One level of a tree. ``values`` [nodes]; the nodes under node i of the level above are those from ``starts[i]`` to
    ``starts[i + 1]``."""

    values: Indices
    starts: Indices

    def of(self, nodes: Indices) -> tuple[Indices, Indices]:
        """Which of ``nodes``, and which node under it, in all ways."""
        counts = np.diff(self.starts)[nodes]
        rows = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, self.starts[nodes][rows] + within


def _tree(ways: NDArray[np.int64]) -> list[_Level]:
    """``ways`` [ways, stages], the last stage at the root."""
    turned = ways[:, ::-1]
    turned = turned[np.lexsort(turned.T[::-1])]
    levels, above = [], np.zeros(len(turned), dtype=np.int64)
    for depth in range(turned.shape[1]):
        first = np.ones(len(turned), dtype=bool)
        first[1:] = (turned[1:, : depth + 1] != turned[:-1, : depth + 1]).any(axis=1)
        parents = above[first]
        starts = np.searchsorted(parents, np.arange(int(above.max(initial=0)) + 2))
        levels.append(_Level(turned[first, depth], starts))
        above = np.cumsum(first) - 1
    return levels
