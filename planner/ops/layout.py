"""Layout: how a local tensor lies in memory. What autograd keeps depends on it: a reshape that strides do not allow
is a copy.

Strides follow torch's own rules, for concrete extents: views move strides; pointwise operations inherit the operands'
order of dims (``TensorIterator``: aten/src/ATen/TensorIterator.cpp, ``reorder_dimensions``); everything else is
row-major.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.ir.types import DTYPE_BYTES, TensorType


@dataclass(frozen=True)
class Layout:
    """Extents and strides in elements, of one rank's tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @cached_property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def size_bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def is_complex(self) -> bool:
        return self.dtype.startswith("complex")

    @cached_property
    def in_order(self) -> bool:
        """Whether the dims lie in their order, however far apart."""
        strides = [stride for size, stride in zip(self.sizes, self.strides, strict=True) if size > 1 and stride]
        return strides == sorted(strides, reverse=True)

    @property
    def dense(self) -> bool:
        """Whether its elements lie side by side, each once, in whatever order."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return last == self.elements - 1 and all(self.strides)

    @property
    def overlaps(self) -> bool:
        """Whether it was stretched: several elements lie in one place (ATen/MemoryOverlap.cpp)."""
        return any(size > 1 and not stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @cached_property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def row_major(sizes: Sequence[int], dtype: str) -> Layout:
    """A contiguous tensor."""
    return Layout(tuple(sizes), _ordered(sizes, tuple(range(len(sizes) - 1, -1, -1))), dtype)


def fresh(type_: TensorType, batch: int) -> Layout:
    """A contiguous tensor of a local type at a batch."""
    return row_major(type_.sizes(batch), type_.dtype)


def reshaped(layout: Layout, sizes: Sequence[int]) -> Layout | None:
    """The view of a tensor with other extents, or None where only a copy will do (``computeStride`` of
    ATen/TensorUtils)."""
    if layout.elements == 0 or layout.elements != math.prod(sizes):
        return None
    strides = [0] * len(sizes)
    target = len(sizes) - 1
    chunk, base = 1, layout.strides[-1] if layout.strides else 1
    for dim in range(len(layout.sizes) - 1, -1, -1):
        chunk *= layout.sizes[dim]
        ends = dim == 0 or (layout.sizes[dim - 1] != 1 and layout.strides[dim - 1] != chunk * base)
        if not ends:
            continue
        covered = 1
        while target >= 0 and (covered < chunk or sizes[target] == 1):
            strides[target] = covered * base
            covered *= sizes[target]
            target -= 1
        if covered != chunk:
            return None
        if dim > 0:
            chunk, base = 1, layout.strides[dim - 1]
    if target >= 0 and any(size != 1 for size in sizes[: target + 1]):
        return None
    return Layout(tuple(sizes), tuple(strides), layout.dtype)


def inherited(operands: Sequence[Layout], sizes: Sequence[int], dtype: str) -> Layout:
    """What a pointwise operation makes of its operands: dense, in their common order of dims."""
    aligned = [broadcast_strides(operand, sizes) for operand in operands if operand.sizes]
    order = list(range(len(sizes) - 1, -1, -1))
    for start in range(1, len(order)):
        upper = start
        for lower in range(start - 1, -1, -1):
            comparison = _compare(aligned, sizes, order[lower], order[upper])
            if comparison > 0:
                order[lower], order[upper] = order[upper], order[lower]
                upper = lower
            elif comparison < 0:
                break
    return Layout(tuple(sizes), _ordered(sizes, order), dtype)


def computed(operand: Layout) -> Layout:
    """What a pointwise operation makes of one value."""
    return inherited((operand,), operand.sizes, operand.dtype)


def channels_last(layout: Layout) -> bool:
    """Whether torch takes an image's or a volume's channels to lie innermost (c10/core/MemoryFormat.h,
    ``is_channels_last_strides_2d`` and ``_3d``)."""
    rank = len(layout.sizes)
    if rank not in (4, 5) or not layout.strides[1] or 0 in layout.sizes:
        return False
    least = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        stride = layout.strides[dim]
        if stride < least or (dim == 0 and least == layout.strides[1]):
            return False
        least = stride * layout.sizes[dim]
    return True


def with_channels_last(sizes: Sequence[int], dtype: str) -> Layout:
    """A tensor whose channels (dim 1) lie innermost."""
    return Layout(tuple(sizes), _ordered(sizes, (1, *range(len(sizes) - 1, 1, -1), 0)), dtype)


def with_innermost(layout: Layout, dim: int, sizes: Sequence[int], dtype: str) -> Layout:
    """A tensor in which one dim lies innermost, the others in their order in ``layout``."""
    rank = len(layout.sizes)
    others = sorted((other for other in range(rank) if other != dim % rank), key=lambda other: (layout.strides[other], -other))
    return Layout(tuple(sizes), _ordered(sizes, (dim % rank, *others)), dtype)


def _compare(operands: Sequence[tuple[int, ...]], sizes: Sequence[int], first: int, second: int) -> int:
    """Positive where ``second`` should lie inside ``first``."""
    for strides in operands:
        if strides[first] == 0 or strides[second] == 0:
            continue
        if strides[first] != strides[second]:
            return 1 if strides[first] > strides[second] else -1
        if sizes[first] > sizes[second]:
            return 1
    return 0


def broadcast_sizes(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Extents of what two tensors make, element by element."""
    rank = max(len(first), len(second))
    left, right = (1,) * (rank - len(first)) + tuple(first), (1,) * (rank - len(second)) + tuple(second)
    return tuple(max(a, b) for a, b in zip(left, right, strict=True))


def broadcast_strides(operand: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor that is stretched to other extents."""
    missing = len(sizes) - len(operand.sizes)
    own = (
        0 if size == 1 and sizes[missing + dim] != 1 else operand.strides[dim]
        for dim, size in enumerate(operand.sizes)
    )
    return (0,) * missing + tuple(own)


def _ordered(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Dense strides, ``order`` from the innermost dim."""
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)
