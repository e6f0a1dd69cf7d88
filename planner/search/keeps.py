"""How many blocks of a run a rank can keep much of, however many each of its stages has: rows that parts of blocks miss.

By the memory of a rank with twelve blocks, 9.7 of them may keep their activations: nine, then, and three are recomputed. As
long as only the rank's sum of blocks is known, or not even that, these are covers (:mod:`covers`) of stages instead of blocks.
A set S of a rank's stages are those where a block that keeps a level's activations takes at least w bytes more than its
smallest choice at some instant; z of all the rank's blocks choose a ZeRO stage that holds less than the one that holds most. Of
n blocks, k on S keep that much: ``k w`` is at most what n smallest blocks leave of the memory, and what z free. So k is at most
K(n, z), whole, and ``k <= K(n, 0) + slope z`` with the largest slope to any K(n, z). Over the numbers of blocks that the rank
can have, the row is the concave hull of K(n, 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.search.linear import Floats, Indices, Row
from planner.search.rows import MISSED_BYTES, Layout
from planner.search.tables import AT_TIMES
from planner.search.works import lower_hull


def kept_rows(layout: Layout, most: Sequence[Indices]) -> list[Row]:
    """For each run of several blocks and each rank, where it has ``most`` [runs][ranks] blocks of it."""
    rows = list[Row]()
    for run, caps in enumerate(most):
        for rank in range(layout.shape.pipeline) if layout.stream.runs[run].count > 1 else ():
            numbers = layout.numbers(run, rank, caps)
            if numbers.size and numbers[-1]:
                rows += _Keeps(layout, run, rank, numbers).rows
    return rows


@dataclass(frozen=True)
class _Most:
    """At most ``blocks`` [numbers] keep much, and ``slope`` more for each that its ZeRO stage makes smaller. ``keeping``,
    ``smaller``: positions of both among the rank's choices."""

    blocks: tuple[int, ...]
    slope: float
    keeping: Indices
    smaller: Indices


@dataclass(frozen=True)
class _Keeps:
    """Of a rank that has ``numbers`` of blocks of a run."""

    layout: Layout
    run: int
    rank: int
    numbers: Indices

    @property
    def rows(self) -> list[Row]:
        """As far as they say more than that its blocks are so many."""
        found = dict[bytes, _Most]()
        for most in self._each():
            known = found.get(most.keeping.tobytes())
            if known is None or (most.blocks, most.slope) < (known.blocks, known.slope):
                found[most.keeping.tobytes()] = most
        blocks_at, choice_at = self.layout.n_at[self._pairs], self.layout.choice_at[self._memory[0]]
        rows = list[Row]()
        for most in found.values():
            smaller = most.smaller if most.slope else most.smaller[:0]
            columns = np.concatenate([choice_at[most.keeping], blocks_at, choice_at[smaller]])
            for slope, least in lower_hull(self.numbers, -np.array(most.blocks)):
                parts = (np.ones(len(most.keeping)), np.full(len(blocks_at), slope), np.full(len(smaller), -most.slope))
                rows.append(Row(-math.inf, -least, columns, np.concatenate(parts)))
        return rows

    @cached_property
    def _pairs(self) -> Indices:
        return self.layout.members(self.run, self.rank)

    @cached_property
    def _memory(self) -> tuple[Indices, Floats]:
        """The rank's choices, and the bytes of a block under each of them, [instants, choices]."""
        return self.layout.memory_of(self.rank)[:2]

    def _each(self) -> Iterator[_Most]:
        """Of every instant, level and set of stages."""
        layout, pairs = self.layout, self._pairs
        members, sizes = self._memory
        saved, kind = layout.vectors[members, AT_TIMES], layout.kind[members]
        recompute, zero = ([np.flatnonzero((layout.pair[members] == at) & (kind == each)) for at in pairs] for each in (0, 1))
        alone = np.bincount(layout.pair_stage)[layout.pair_stage[pairs]] == 1
        certain = np.maximum(layout.fewest[pairs], alone)
        others = np.maximum(self.numbers - certain.sum(), 0.0)
        for size, room in zip(sizes, layout.room_of(self.run, self.rank), strict=True):
            smallest = np.array([size[at].min() for at in recompute])
            block = smallest + np.array([size[at].max() for at in zero])
            left = room + MISSED_BYTES - certain @ block - others * block.min()
            freed = max(float(np.ptp(size[at])) for at in zero)
            smaller = np.concatenate([at[size[at] < size[at].max()] for at in zero])
            for level in np.unique(saved[recompute[0]])[1:]:
                keeping = [at[saved[at] >= level] for at in recompute]
                more = np.array([size[at].min() for at in keeping]) - smallest
                for each in np.unique(more[more > 0]):
                    most = self._most(left, float(each), freed)
                    if (most[0] < self.numbers).any():
                        on = np.flatnonzero(more >= each)
                        yield _Most(tuple(most[0].tolist()), most[1], np.concatenate([keeping[at] for at in on]), smaller)

    def _most(self, left: Floats, each: float, freed: float) -> tuple[Indices, float]:
        """K(n, 0) [numbers] and the slope, where blocks take ``each`` bytes more of those that are ``left`` [numbers]."""
        freeing = np.arange(int(self.numbers[-1]) + 1)
        most = np.floor((left[:, None] + freeing * freed) / each)
        # Where not even the smallest blocks fit, some of them have to be smaller.
        most = np.minimum(np.maximum(most, 0.0), self.numbers[:, None]).astype(np.int64)
        return most[:, 0], float(((most[:, 1:] - most[:, :1]) / freeing[1:]).max(initial=0.0))
