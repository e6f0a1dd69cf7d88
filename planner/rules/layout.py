"""Layouts: how one dim (or one index of an equation) is cut over the ranks, and how it moves between the two.

A layout is a list of segments and a unit, as in :class:`~planner.ir.placement.Placement`, but always explicit and in one
canonical form: where every segment divides evenly the unit says nothing, so it is 1. Two layouts are then equal exactly
when every rank holds the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from planner.ir.placement import Placement, shard

SEGMENT_LIMIT = 8
"""Fused projections have a few parts; a dim cut in more segments than this is a stride, which nothing gains from."""


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Each segment (sizes in elements) is split over the ranks in multiples of ``unit``, the first ranks get more."""

    segments: tuple[int, ...]
    unit: int = 1

    def placement(self, dim: int) -> Placement:
        return shard(dim, self.segments, self.unit)


@dataclass(frozen=True, slots=True)
class Part:
    """Where an index lies in a tensor: dim ``dim`` is ``outer`` x index x ``inner`` (row-major, as a view merges dims).

    ``piece``: the dim holds only positions [start, stop) of the index (a part of a split or of a concatenation).
    """

    dim: int
    outer: int = 1
    inner: int = 1
    piece: tuple[int, int] | None = None


def canonical(segments: Sequence[int], unit: int, degree: int) -> Layout | None:
    """The layout in canonical form; None where a rank would be empty or a unit be cut."""
    if len(segments) > SEGMENT_LIMIT or any(size % unit or size < unit * degree for size in segments):
        return None
    even = all(size % (unit * degree) == 0 for size in segments)
    return Layout(tuple(segments), 1 if even else unit)


def layout_of(placement: Placement, extent: int, degree: int) -> Layout | None:
    """The layout of a placed dim of that extent."""
    return canonical(placement.segments or (extent,), placement.unit, degree)


def put(layout: Layout, part: Part, degree: int) -> Layout | None:
    """The layout that an index's layout gives to the dim where the index lies."""
    segments = layout.segments
    if part.piece is not None:
        cut = _segments_within(segments, *part.piece)
        if cut is None:
            return None
        segments = cut
    scaled = tuple(size * part.inner for size in segments) * part.outer
    return canonical(scaled, layout.unit * part.inner, degree)


def take(layout: Layout, part: Part, degree: int) -> Layout | None:
    """The layout of the index (of its piece, where the part is one) that gives the dim this layout."""
    count, left = divmod(len(layout.segments), part.outer)
    if left or layout.segments != layout.segments[:count] * part.outer:
        return None
    segments = layout.segments[:count]
    if any(size % part.inner for size in segments):
        return None
    inside = tuple(size // part.inner for size in segments)
    if layout.unit % part.inner == 0:
        return canonical(inside, layout.unit // part.inner, degree)
    return canonical(inside, 1, degree) if _even(segments, part.inner, degree) and layout.unit == 1 else None


def join(pieces: Sequence[Sequence[Layout]], degree: int) -> Iterator[Layout]:
    """Layouts of a whole index whose consecutive pieces have these layouts: those combinations that share a unit.

    Pieces of one size are cut alike (the parts of a fused projection meet again, position by position).
    """
    for choice in product(*pieces):
        if len({sum(layout.segments) for layout in choice}) < len(set(choice)):
            continue
        segments = tuple(size for layout in choice for size in layout.segments)
        for unit in sorted({layout.unit for layout in choice}):
            fits = all(layout.unit == unit or _even(layout.segments, unit, degree) for layout in choice)
            joined = canonical(segments, unit, degree) if fits else None
            if joined is not None:
                yield joined


def _even(segments: Sequence[int], unit: int, degree: int) -> bool:
    """Whether every rank's part of each segment is the same number of whole units."""
    return all(size % (unit * degree) == 0 for size in segments)


def _segments_within(segments: Sequence[int], start: int, stop: int) -> tuple[int, ...] | None:
    """The segments between two positions, or None where a position lies inside a segment."""
    ends = [0]
    for size in segments:
        ends.append(ends[-1] + size)
    if start not in ends or stop not in ends:
        return None
    return tuple(segments[ends.index(start):ends.index(stop)])
