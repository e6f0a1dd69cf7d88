"""How many of a rank's blocks can keep much of their activations: rows that parts of blocks miss and whole ones meet.

By the memory of a rank with eight blocks, 2.8 of them may be kept whole: two, then. Of a set S of blocks, k choose a level of
recomputation that saves much, z (of all the rank's) a ZeRO stage that holds less than the one that holds most. Each of the k
takes at least what it takes beyond its smallest choice, each of the z frees at most what is between its largest and smallest.
So k is at most K(z), and ``k <= K(0) + slope z`` with the largest slope to any K(z) holds for all whole choices (a lifted cover
inequality of the memory row: Balas 1975, "Facets of the knapsack polytope"). S: of each row, the blocks that take most.

Blocks are those of a leaf: how many each stage has is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.search.linear import Indices, Row
from planner.search.rows import Layout
from planner.search.tables import AT_TIMES

MISSED_BYTES = 1.0
"""Sums of bytes are rounded by less."""


@dataclass(frozen=True)
class _Cover:
    """At most ``most`` blocks, and ``slope`` more for each that its ZeRO stage makes smaller: columns of both."""

    most: int
    slope: float
    keeping: Indices
    smaller: Indices

    @property
    def row(self) -> Row:
        smaller = self.smaller if self.slope else self.smaller[:0]
        values = np.append(np.ones(len(self.keeping)), np.full(len(smaller), -self.slope))
        return Row(-math.inf, float(self.most), np.append(self.keeping, smaller), values)


def cover_rows(layout: Layout) -> list[Row]:
    """Of every rank, as far as they say more than that its blocks are so many."""
    return [row for rank in range(layout.shape.pipeline) for row in _of_rank(layout, rank)]


def _of_rank(layout: Layout, rank: int) -> list[Row]:
    members, sizes, free = layout.held(rank)
    groups = list(_groups(layout, members))
    recomputed, sharded = ([each for each in groups if layout.kind[members[each[0]]] == kind] for kind in (0, 1))
    blocks = {int(each[0]): round(float(layout.fewest[layout.pair[members[each[0]]]])) for each in groups}
    found: dict[tuple[float, tuple[int, ...]], _Cover] = {}
    for size, room in zip(sizes, free - layout.least_transients[rank], strict=True):
        # With the smallest level of recomputation and the largest ZeRO stage everywhere.
        room -= sum(size[each].min() * blocks[int(each[0])] for each in recomputed)
        room -= sum(size[each].max() * blocks[int(each[0])] for each in sharded)
        freed = np.sort(np.concatenate([np.repeat(np.ptp(size[each]), blocks[int(each[0])]) for each in sharded]))[::-1]
        smaller = np.concatenate([each[size[each] < size[each].max()] for each in sharded])
        rooms = room + MISSED_BYTES + np.append(0.0, np.cumsum(freed[freed > 0]))
        if rooms[0] < 0:
            continue
        for level in np.unique(layout.vectors[members[np.concatenate(recomputed)], AT_TIMES])[1:]:
            keeping = [(each, each[layout.vectors[members[each], AT_TIMES] >= level]) for each in recomputed]
            parts = [
                (float(size[keeps].min() - size[each].min()), keeps, blocks[int(each[0])])
                for each, keeps in keeping if 0 < len(keeps) < len(each) and blocks[int(each[0])]
            ]
            parts.sort(key=lambda part: -part[0])
            for count in range(1, len(parts) + 1):
                weights = np.repeat([part[0] for part in parts[:count]], [part[2] for part in parts[:count]])
                most = np.searchsorted(np.cumsum(weights[::-1]), rooms, side="right")
                if most[0] == len(weights):
                    continue
                slope = float(((most[1:] - most[0]) / np.arange(1, len(most))).max(initial=0.0))
                columns = np.sort(np.concatenate([part[1] for part in parts[:count]]))
                key = (float(level), tuple(columns.tolist()))
                known = found.get(key)
                if known is None or (int(most[0]), slope) < (known.most, known.slope):
                    at = layout.choice_at[members]
                    found[key] = _Cover(int(most[0]), slope, at[columns], at[smaller])
    covers = list(found.values())
    return [cover.row for cover in covers if not any(_implies(other, cover) for other in covers)]


def _groups(layout: Layout, members: Indices) -> Iterator[Indices]:
    """Positions in ``members`` that are choices of one kind for the same blocks."""
    keys = 2 * layout.pair[members] + layout.kind[members]
    for key in np.unique(keys):
        yield np.flatnonzero(keys == key)


def _implies(cover: _Cover, other: _Cover) -> bool:
    """Whether a cover of more columns says as much."""
    stricter = cover.most <= other.most and cover.slope <= other.slope
    return stricter and len(cover.keeping) > len(other.keeping) and bool(np.isin(other.keeping, cover.keeping).all())
