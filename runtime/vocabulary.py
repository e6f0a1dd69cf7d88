"""Softmax and cross-entropy over a dim that is split over a group's ranks; cross-entropy of half precisions besides."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from .primitives import all_reduce
from .undefined import or_none

HALF = (torch.bfloat16, torch.float16)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _lift_target(x: Tensor, target: Tensor) -> Tensor:
    """``target`` [N, ...] with a class dim of one, as ``gather`` along the class dim needs it ([C]: a 0-dim target)."""
    return target.unsqueeze(_class_dim(x))


def _class_dim(x: Tensor) -> int:
    return 1 if x.dim() > 1 else 0


def _together(x: Tensor, operation: Literal["sum", "max"], group: str) -> Tensor:
    """``operation`` over the group's ranks; the empty group is this rank alone."""
    return all_reduce(x, operation, group) if group else x


def _shifted(x: Tensor, dim: int, group: str) -> tuple[Tensor, Tensor]:
    """``x`` minus its maximum along ``dim`` over all ranks, and the sum of its exponentials (``dim`` kept)."""
    centred = x - _together(x.amax(dim, keepdim=True), "max", group)
    return centred, _together(centred.exp().sum(dim, keepdim=True), "sum", group)


class CrossEntropy(Function):
    """Sum of ``log(sum(exp(logits))) - logits[target]`` over targets that are not ``ignore_index``.

    Keeps the logits and one number a row; the softmax is made again in the backward pass. Half precisions are computed
    in float32, one tensor of the logits' shape at a time. ``group``: empty where the logits are whole.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: str, start: int, length: int, ignore_index: int
    ) -> Tensor:
        dim = _class_dim(logits)
        largest = _together(_wide(logits.amax(dim, keepdim=True)), "max", group)
        centred = logits - largest
        counted = _lift_target(logits, target != ignore_index)
        wanted = _lift_target(logits, target) - start
        own = (wanted >= 0) & (wanted < length) & counted
        index = torch.where(own, wanted, 0)
        picked = _together(torch.where(own, centred.gather(dim, index), 0.0), "sum", group)
        log_total = _together(centred.exp_().sum(dim, keepdim=True), "sum", group).log()
        ctx.save_for_backward(logits, largest + log_total, index, own, counted)
        return torch.where(counted, log_total - picked, 0.0).sum()

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, normaliser, index, own, counted = ctx.saved_tensors
        dim = _class_dim(logits)
        slope = (logits - normaliser).exp_()
        slope.scatter_add_(dim, index, -own.to(slope.dtype))
        slope.mul_(torch.where(counted, gradient.to(slope.dtype), 0.0))
        return slope.to(logits.dtype), None, None, None, None, None


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
