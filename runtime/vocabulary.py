"""Softmax and cross-entropy over a dim that is split over a group's ranks; cross-entropy of half precisions besides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .primitives import all_reduce
from .undefined import or_none

HALF = (torch.bfloat16, torch.float16)
AT_ONCE = 2**25
"""Elements of logits that cross-entropy computes with at a time: 128 MiB in float32, where a micro-batch's logits may have a
billion elements."""


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _lift_target(x: Tensor, target: Tensor) -> Tensor:
    """``target`` [N, ...] with a class dim of one, as ``gather`` along the class dim needs it ([C]: a 0-dim target)."""
    return target.unsqueeze(_class_dim(x))


def _class_dim(x: Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _shifted(x: Tensor, dim: int, group: str) -> tuple[Tensor, Tensor]:
    """``x`` minus its maximum along ``dim`` over all ranks, and the sum of its exponentials (``dim`` kept)."""
    centred = x - all_reduce(x.amax(dim, keepdim=True), "max", group)
    return centred, all_reduce(centred.exp().sum(dim, keepdim=True), "sum", group)


def _in_pieces(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the first dim's parts of ``x``, of :data:`AT_ONCE` elements or one row, and the same of the ``others``."""
    rows = max(1, AT_ONCE * x.size(0) // max(1, x.numel())) if x.dim() > 1 else x.size(0)
    yield from zip(*(tensor.split(rows) for tensor in (x, *others)), strict=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class HalfCrossEntropy(Function):
    """Sum of ``log(sum(exp(logits))) - logits[target]`` over targets that are not ``ignore_index``, of whole logits in half
    precision: computed in float32, a piece of the rows at a time. Keeps the logits; the softmax is made again in the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        dim = _class_dim(logits)
        counted = _lift_target(logits, target != ignore_index)
        index = torch.where(counted, _lift_target(logits, target), 0)
        likely = _joined([
            torch.log_softmax(part.float(), dim).gather(dim, at) for part, at in _in_pieces(logits, index)
        ])
        ctx.save_for_backward(logits, index, counted)
        return torch.where(counted, likely, 0.0).sum().neg()

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, index, counted = ctx.saved_tensors
        dim, result, upstream = _class_dim(logits), torch.empty_like(logits), gradient.float()
        for part, made, at, counts in _in_pieces(logits, result, index, counted):
            _write_slope(made, torch.softmax(part.float(), dim), at, counts, counts, dim, upstream)
        return result, None, None


class CrossEntropy(Function):
    """:class:`HalfCrossEntropy` where the classes are split over the ranks of ``group``, in any precision: ``length`` of them
    from ``start`` on are this rank's. Keeps one number a row besides."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: str, start: int, length: int, ignore_index: int
    ) -> Tensor:
        dim = _class_dim(logits)
        largest = all_reduce(_wide(logits.amax(dim, keepdim=True)), "max", group)
        counted = _lift_target(logits, target != ignore_index)
        wanted = _lift_target(logits, target) - start
        own = (wanted >= 0) & (wanted < length) & counted
        index = torch.where(own, wanted, 0)
        picked = all_reduce(torch.where(own, logits.gather(dim, index) - largest, 0.0), "sum", group)
        totals = [(part - most).exp_().sum(dim, keepdim=True) for part, most in _in_pieces(logits, largest)]
        log_total = all_reduce(_joined(totals), "sum", group).log()
        ctx.save_for_backward(logits, largest + log_total, index, own, counted)
        return torch.where(counted, log_total - picked, 0.0).sum()

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, normaliser, index, own, counted = ctx.saved_tensors
        dim = _class_dim(logits)
        result, upstream = torch.empty_like(logits), gradient.to(normaliser.dtype)
        for part, made, most, at, mine, counts in _in_pieces(logits, result, normaliser, index, own, counted):
            _write_slope(made, _shares(part, most, made), at, mine, counts, dim, upstream)
        return result, None, None, None, None, None


def _shares(logits: Tensor, normaliser: Tensor, result: Tensor) -> Tensor:
    """Softmax of some rows, in ``result`` where that is of the normaliser's dtype."""
    wide = result if result.dtype == normaliser.dtype else torch.empty_like(result, dtype=normaliser.dtype)
    return torch.sub(logits, normaliser, out=wide).exp_()


def _write_slope(
    result: Tensor, wide: Tensor, index: Tensor, own: Tensor, counted: Tensor, dim: int, gradient: Tensor
) -> None:
    """The gradient of some rows of the logits: their softmax (``wide``) less one at the target, times the loss's gradient."""
    wide.scatter_add_(dim, index, -own.to(wide.dtype))
    wide.mul_(torch.where(counted, gradient, 0.0))
    if wide is not result:
        result.copy_(wide)


class Softmax(Function):
    """Softmax along a split ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        centred, total = _shifted(_wide(x), dim, group)
        result = (centred.exp() / total).to(x.dtype)
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        wide, upstream = _wide(result), _wide(gradient)
        inner = all_reduce((wide * upstream).sum(ctx.dim, keepdim=True), "sum", ctx.group)
        return (wide * (upstream - inner)).to(result.dtype), None, None


class LogSoftmax(Function):
    """Logarithm of the softmax along a split ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        centred, total = _shifted(_wide(x), dim, group)
        result = (centred - total.log()).to(x.dtype)
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        upstream = _wide(gradient)
        total = all_reduce(upstream.sum(ctx.dim, keepdim=True), "sum", ctx.group)
        return (upstream - _wide(result).exp() * total).to(result.dtype), None, None
