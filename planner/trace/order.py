"""In which order the samples lie in a dim, and what views do to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.types import BatchMultiple, Extent, TensorType


@dataclass(frozen=True, slots=True)
class Order:
    """A dim is ``outer`` x batch x ``inner``, row-major: a merged [batch, sequence] is 1 x B x sequence."""

    outer: int
    inner: int

    @property
    def factor(self) -> int:
        return self.outer * self.inner

    def __str__(self) -> str:
        return " x ".join(str(part) for part in (self.outer, "B", self.inner) if part != 1)


PLAIN = Order(1, 1)


def batch_dims(type_: TensorType) -> list[int]:
    """Dims that grow with the batch."""
    return [dim for dim, extent in enumerate(type_.shape) if isinstance(extent, BatchMultiple)]


def factor(type_: TensorType, dim: int) -> int:
    extent = type_.shape[dim]
    return extent.factor if isinstance(extent, BatchMultiple) else 0


def orders(count: int) -> Iterator[Order]:
    """All orders of ``count`` positions a sample."""
    yield from (Order(count // inner, inner) for inner in range(1, count + 1) if count % inner == 0)


def reshaped(order: Order, before: TensorType, after: TensorType) -> Order | None:
    """The order after a view that keeps the row-major order; None where no dim holds the samples by themselves."""
    (old,), (new,) = batch_dims(before), batch_dims(after)
    stride = order.inner * _size(before.shape[old + 1:])
    step = _size(after.shape[new + 1:])
    inner, left = divmod(stride, step) if step else (0, 1)
    return Order(factor(after, new) // inner, inner) if inner and not left and factor(after, new) % inner == 0 else None


def _size(shape: tuple[Extent, ...]) -> int:
    return math.prod(extent for extent in shape if isinstance(extent, int))


def sliced(order: Order, start: Extent, stop: Extent, step: int) -> Order | None:
    """The order of what a slice takes; None where it takes other parts of one sample than of another."""
    first, last = (bound.factor if isinstance(bound, BatchMultiple) else bound for bound in (start, stop))
    if isinstance(start, int) and start and not (start < step and order.inner % step == 0):
        return None
    if step != 1:
        whole = (not isinstance(start, BatchMultiple)) and last == order.factor and order.inner % step == 0
        return Order(order.outer, order.inner // step) if whole else None
    if first % order.inner or last % order.inner or last <= first:
        return None
    return Order((last - first) // order.inner, order.inner)
