"""Layout: which boxes of a whole tensor one rank of the tensor axis holds. All extents and offsets are in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Offsets = tuple[int, ...]
Box = tuple[Offsets, Offsets, Offsets]
"""(offsets in the whole tensor, sizes, offsets in the local tensor)"""


def split_sizes(extent: int, degree: int, unit: int = 1) -> tuple[int, ...]:
    """Elements of one segment on each rank: multiples of ``unit``, as even as possible, larger ones first.

    Raises ValueError where ``unit`` does not divide the extent.
    """
    if extent % unit:
        raise ValueError(f"{extent} is no multiple of {unit}")
    whole, left = divmod(extent // unit, degree)
    return tuple((whole + (rank < left)) * unit for rank in range(degree))


def spans(
    extent: int, degree: int, rank: int, segments: Sequence[int] = (), unit: int = 1
) -> tuple[tuple[int, int], ...]:
    """(start, length) in the whole dim of what ``rank`` holds of each segment, in order; empty parts are left out."""
    parts, begin = [], 0
    for segment in segments or (extent,):
        sizes = split_sizes(segment, degree, unit)
        parts.append((begin + sum(sizes[:rank]), sizes[rank]))
        begin += segment
    return tuple((start, length) for start, length in parts if length) or ((0, 0),)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor of whole ``shape`` lies over ``degree`` ranks.

    ``dim`` is None where every rank holds all of it; otherwise that dim is made of ``segments`` (empty: one), each
    split over the ranks in multiples of ``unit``, as evenly as possible, the first ranks one unit more.
    """

    shape: tuple[int, ...]
    degree: int = 1
    dim: int | None = None
    segments: tuple[int, ...] = ()
    unit: int = 1

    @property
    def sharded(self) -> bool:
        """Whether the ranks hold different parts."""
        return self.dim is not None and self.degree > 1

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what ``rank`` holds."""
        if not self.sharded:
            return self.shape
        assert self.dim is not None
        extent = sum(length for _, length in self._spans(rank))
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """What ``rank`` holds: boxes of the whole tensor and where each lies in the local one; no empty ones."""
        if not self.sharded:
            return ((self._origin(), self.shape, self._origin()),)
        assert self.dim is not None
        boxes, begin = [], 0
        for start, length in self._spans(rank):
            if length:
                boxes.append((self._at(start), self._sized(length), self._at(begin)))
            begin += length
        return tuple(boxes)

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of the whole tensor that ``rank`` holds: a view where it is one piece, a copy otherwise."""
        if not self.sharded:
            return full
        assert self.dim is not None
        pieces = [full.narrow(self.dim, start, length) for start, length in self._spans(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def _spans(self, rank: int) -> tuple[tuple[int, int], ...]:
        assert self.dim is not None
        return spans(self.shape[self.dim], self.degree, rank, self.segments, self.unit)

    def _origin(self) -> Offsets:
        return (0,) * len(self.shape)

    def _at(self, offset: int) -> Offsets:
        return tuple(offset if dim == self.dim else 0 for dim in range(len(self.shape)))

    def _sized(self, length: int) -> Offsets:
        return tuple(length if dim == self.dim else extent for dim, extent in enumerate(self.shape))
