"""Where the blocks of a chain lie, all that may be quicker than a target: by what its ranks take in all (:mod:`choices`).

Numbers of blocks alone (:mod:`patterns`) say what whole blocks cost; where memory is short, what ranks recompute costs as
much, and both together leave few layings or none. Choices are taken as a little better than they are, so that there are fewer:
what is left is for exact programs to decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.choices import Cases, Choices, Told, every_way
from planner.search.greedy import Shares
from planner.search.linear import Indices
from planner.search.paths import Paths
from planner.search.patterns import Patterns
from planner.search.stream import Stream
from planner.search.tables import AT_TIMES, PASSES, PERSISTENT, Table
from planner.search.together import RankCosts
from planner.search.ways import Range

AT_FIRST, MOST_ACTIONS = 25_000_000, 60_000_000
"""Actions times cases where every way of every rank is tried once, and that are simulated at most: beyond, programs are
quicker."""
MOST_LAYINGS, MOST_ON_STAGE = 300, 12
"""A rank whose blocks can lie on its stages in more ways is not told apart, nor one that can have more of them on a stage."""
ALIKE = 0.01
"""Choices that differ by less than this part in their seconds and in their bytes count as one."""


def layings_of(patterns: Patterns, costs: RankCosts, paths: Paths, target_s: float) -> Layings | None:
    """Of a chain; None where ranks have too many ways. ``costs`` say how many blocks a rank has at most in a step that is
    quicker than the target."""
    shape, stream = patterns.shape, relaxed(patterns)
    shares, ranges = Shares.of(stream, shape, patterns.bounds), list[tuple[list[Range], Range]]()
    for rank, (fewest, most) in enumerate(patterns.ranges(costs, target_s)):
        owned = shape.owned(rank)
        beside = most - int(patterns.fewest[owned].sum())
        if fewest > most or not 0 <= beside <= MOST_ON_STAGE:
            return None
        if math.comb(beside + shape.virtual - 1, beside) > MOST_LAYINGS:
            return None
        own, single = list[Range](), 0
        for portion in shares.portions[rank]:
            low = int(patterns.fewest[owned[portion.slot]])
            own.append((low, low + beside) if patterns.is_long(portion.run) else (portion.blocks, portion.blocks))
            single += not patterns.is_long(portion.run) and portion.kind == 0
        ranges.append((own, (fewest + single, most + single)))
    ways = every_way(shares, stream, ranges, target_s - costs.before_s)
    if ways is None or sum(len(each.blocks) for each in ways) * shape.actions > AT_FIRST:
        return None
    return Layings(shares, stream, ways, paths, patterns.stream.blocks, MOST_ACTIONS, patterns=patterns)


def relaxed(patterns: Patterns) -> Stream:
    """A chain's stream with one block of the run on every stage, beside the single blocks. These have the best of all their
    choices at once; of the run's, those that are nearly the same count as one that is as good as any of them. (As they are,
    where gradients hide behind what is computed: less of that is not better in all then.)"""
    stream = patterns.spread
    if stream.gradients.hidden > 0:
        return stream
    return replace(stream, single=tuple(
        (_joined(compute), traffic) if patterns.is_long(run) else (_best(compute), _best(traffic))
        for run, (compute, traffic) in enumerate(stream.single)
    ))


def _joined(table: Table) -> Table:
    """Fewer choices of recomputation."""
    saved = table.sums[:, PERSISTENT] + table.sums[:, AT_TIMES]
    passes, groups = table.sums[:, :PASSES].sum(axis=1), list[list[int]]()
    for row in np.lexsort((saved, passes)).tolist():
        first = groups[-1][0] if groups else -1
        quick = first >= 0 and passes[row] <= passes[first] * (1 + ALIKE)
        if quick and abs(saved[row] - saved[first]) <= ALIKE * saved[first]:
            groups[-1].append(row)
        else:
            groups.append([row])
    parts = [_best(table.rows(np.array(group))) for group in groups]
    return Table(
        np.concatenate([part.sums for part in parts]), np.concatenate([part.peaks for part in parts]),
        np.concatenate([part.lasting for part in parts]), tuple(part.names[0] for part in parts),
    )


def _best(table: Table) -> Table:
    """One choice, as good as any in everything."""
    sums, peaks, lasting = (part.min(axis=0, keepdims=True) for part in (table.sums, table.peaks, table.lasting))
    return Table(sums, peaks, lasting, table.names[:1])


@dataclass
class Layings(Choices):
    """The layings of a chain that may still be quicker than a target; ``patterns`` of it. ``found``: blocks of the run on each
    virtual stage; how quick a laying can be is not known, for it is left where the first whole assignment has it."""

    patterns: Patterns = field(kw_only=True)
    found: set[tuple[int, ...]] = field(default_factory=set)

    @cached_property
    def _laid(self) -> list[tuple[Indices, NDArray[np.int64]]]:
        """Of every rank: which laying each of its ways has [ways], and blocks of the run on its stages [layings, stages]."""
        result = []
        for ways, mine in zip(self.ways, self.shares.portions, strict=True):
            on = np.zeros((self.shares.shape.virtual, ways.counts.shape[1]), dtype=np.int64)
            for at, portion in enumerate(mine):
                on[portion.slot, at] = portion.kind == 0 and self.patterns.is_long(portion.run)
            each = ways.counts.sum(axis=2) @ on.T
            layings, which = np.unique(each, axis=0, return_inverse=True)
            result.append((which.ravel(), layings))
        return result

    def _wanted(self, cases: Cases) -> Cases:
        """Those whose laying is not found yet."""
        pairs = list(zip(cases.left, self._laid, strict=True))
        lows = np.stack([np.where(left, which, len(each)).min(axis=1) for left, (which, each) in pairs], axis=1)
        highs = np.stack([np.where(left, which, -1).max(axis=1) for left, (which, _) in pairs], axis=1)
        laid = (lows == highs).all(axis=1)
        for case in np.flatnonzero(laid):
            laid[case] = self._blocks(lows[case]) in self.found
        return cases.part(~laid)

    def _blocks(self, layings: Indices) -> tuple[int, ...]:
        blocks = np.zeros(self.shares.shape.stages, dtype=np.int64)
        for owned, (_, each), at in zip(self._owned, self._laid, layings, strict=True):
            blocks[owned] = each[at]
        return tuple(blocks.tolist())

    def _tell(self, found: NDArray[np.int64], target_s: float, told: Told) -> float:
        """Keep the layings of whole assignments."""
        for seconds, ways in zip(self._steps(found), found, strict=True):
            if seconds < target_s:
                self.found.add(self._blocks(np.array([which[way] for (which, _), way in zip(self._laid, ways, strict=True)])))
        return target_s
