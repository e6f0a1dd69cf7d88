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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.search.linear import Floats, Indices, Row
from planner.search.rows import MISSED_BYTES, Layout
from planner.search.tables import AT_TIMES


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


@dataclass(frozen=True)
class _Group:
    """``at``: where among a rank's choices those of some blocks are; how many blocks that is."""

    at: Indices
    blocks: int


def cover_rows(layout: Layout) -> list[Row]:
    """Of every rank, as far as they say more than that its blocks are so many."""
    return [row for rank in range(layout.shape.pipeline) for row in _of_rank(layout, rank)]


def _of_rank(layout: Layout, rank: int) -> list[Row]:
    members, sizes, free = layout.memory_of(rank)
    saved, at = layout.vectors[members, AT_TIMES], layout.choice_at[members]
    groups = [list(_groups(layout, members, kind)) for kind in (0, 1)]
    found: dict[tuple[int, ...], _Cover] = {}
    for size, room in zip(sizes, free - layout.least_transients[rank], strict=True):
        for cover in _of_row(size, float(room), saved, *groups):
            key = tuple(cover.keeping.tolist())
            if key not in found or (cover.most, cover.slope) < (found[key].most, found[key].slope):
                found[key] = cover
    covers = [cover for cover in found.values() if not any(_implies(other, cover) for other in found.values())]
    return [replace(cover, keeping=at[cover.keeping], smaller=at[cover.smaller]).row for cover in covers]


def _of_row(
    size: Floats, room: float, saved: Floats, recomputed: Sequence[_Group], sharded: Sequence[_Group]
) -> Iterator[_Cover]:
    """Of one memory row: ``size``, ``saved`` [choices]. Columns are positions among the choices."""
    # With the smallest level of recomputation and the largest ZeRO stage everywhere.
    room -= sum(size[group.at].min() * group.blocks for group in recomputed)
    room -= sum(size[group.at].max() * group.blocks for group in sharded)
    freed = np.sort(np.repeat([np.ptp(size[group.at]) for group in sharded], [group.blocks for group in sharded]))[::-1]
    rooms = room + MISSED_BYTES + np.append(0.0, np.cumsum(freed[freed > 0]))
    if rooms[0] < 0:
        return
    smaller = np.concatenate([group.at[size[group.at] < size[group.at].max()] for group in sharded])
    for level in np.unique(saved[np.concatenate([group.at for group in recomputed])])[1:]:
        keeping = [_Group(group.at[saved[group.at] >= level], group.blocks) for group in recomputed]
        parts = [
            (float(size[keeps.at].min() - size[group.at].min()), keeps)
            for group, keeps in zip(recomputed, keeping, strict=True) if group.blocks and 0 < len(keeps.at) < len(group.at)
        ]
        parts.sort(key=lambda part: -part[0])
        for count in range(1, len(parts) + 1):
            weights = np.repeat([weight for weight, _ in parts[:count]], [keeps.blocks for _, keeps in parts[:count]])
            most = np.searchsorted(np.cumsum(weights[::-1]), rooms, side="right")
            if most[0] < len(weights):
                slope = float(((most[1:] - most[0]) / np.arange(1, len(most))).max(initial=0.0))
                columns = np.sort(np.concatenate([keeps.at for _, keeps in parts[:count]]))
                yield _Cover(int(most[0]), slope, columns, smaller)


def _groups(layout: Layout, members: Indices, kind: int) -> Iterator[_Group]:
    """Choices of one kind for the same blocks."""
    for pair in np.unique(layout.pair[members]):
        at = np.flatnonzero((layout.pair[members] == pair) & (layout.kind[members] == kind))
        yield _Group(at, round(float(layout.fewest[pair])))


def _implies(cover: _Cover, other: _Cover) -> bool:
    """Whether a cover of more columns says as much."""
    stricter = cover.most <= other.most and cover.slope <= other.slope
    return stricter and len(cover.keeping) > len(other.keeping) and bool(np.isin(other.keeping, cover.keeping).all())
