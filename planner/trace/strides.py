"""``as_strided``: what it reads depends on how a tensor lies in memory, and has to be of one sample in every plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, fx

ROWS = ("its strides are of memory that a program lays out row by row: write x.contiguous().as_strided(...), or use unfold, "
        "expand and transpose")
APART = "a plan divides the batch in many ways: keep it first, by the stride that it has, or use unfold and expand"


def misread(node: fx.Node, batch: int) -> tuple[str, str] | None:
    """What is wrong with what an ``as_strided`` reads, in a trace of so many samples, and what would be right. None where it is
    the same in every plan: of a tensor that lies row by row, within it, and each sample of the result of one sample alone."""
    operand = node.args[0]
    given = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(given, Tensor):
        return None
    size, stride = (_numbers(node.args[at]) for at in (1, 2))
    start = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    start = start if isinstance(start, int) else 0
    if not given.is_contiguous() or given.storage_offset() or _last(size, stride, start) >= max(given.numel(), 1):
        return "as_strided reads a tensor that does not lie row by row, or beyond it", ROWS
    if not any(extent and extent % batch == 0 for extent in given.shape):
        return None
    sample = given.numel() // batch
    pieces = size[0] // batch if size and given.shape[0] % batch == 0 and size[0] % batch == 0 else 0
    if not pieces or stride[0] * pieces != sample or _last(size[1:], stride[1:], start) >= stride[0]:
        return "as_strided reads more than one sample, or one of them for all", APART
    return None


def _numbers(value: object) -> tuple[int, ...]:
    assert isinstance(value, Sequence)
    return tuple(int(number) for number in value)


def _last(size: Sequence[int], stride: Sequence[int], start: int) -> int:
    """The last place that is read; -1 where nothing is."""
    return start + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) if math.prod(size) else -1
