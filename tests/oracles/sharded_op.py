"""Oracle of sharding rules: one operation run on every rank's part, against the operation on the whole.

Ranks are a loop in one process. Operands are cut as their placements say, the operation runs on each rank with that
rank's literals, and the outputs are put together again; likewise the gradients, for random gradients of the outputs.
Only the placements' meaning is shared with the planner, none of its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.localize import localize
from planner.ir.placement import OpStrategy, Placement, split_sizes
from planner.ir.types import BatchMultiple, Dtype, Ref

TOLERANCE = 1e-10
SINGLE_TOLERANCE = 1e-4
"""For the one operation that torch has not in float64, a grouped product."""
Parts: TypeAlias = "list[Tensor]"
Lockstep: TypeAlias = "Callable[[Node, OpStrategy, Sequence[list[Tensor]]], list[Tensor] | None]"


class Disproved(AssertionError):
    """A strategy does not compute what the whole operation computes."""


def positions(extent: int, placement: Placement, degree: int, rank: int) -> list[int]:
    """Global positions, in order, that one rank holds of the placed dim."""
    held, start = [], 0
    for segment in placement.segments or (extent,):
        sizes = split_sizes(segment, degree, placement.unit)
        first = start + sum(sizes[:rank])
        held += range(first, first + sizes[rank])
        start += segment
    return held


def scatter(whole: Tensor, placement: Placement, degree: int) -> Parts:
    """A value (or gradient) as the ranks hold it; partial sums are a random split of the sum."""
    if placement.state == "shard":
        extent = whole.shape[placement.dim]
        return [
            whole.index_select(placement.dim, torch.tensor(positions(extent, placement, degree, rank)))
            for rank in range(degree)
        ]
    if placement.state == "partial":
        parts = [torch.randn_like(whole) for _ in range(degree - 1)]
        return [*parts, whole - sum(parts)] if parts else [whole]
    return [whole] * degree


def combine(parts: Sequence[Tensor], placement: Placement, like: Tensor, what: str) -> Tensor:
    """The whole value that the ranks' parts stand for."""
    if placement.state == "shard":
        whole = torch.empty_like(like)
        for rank, part in enumerate(parts):
            held = positions(like.shape[placement.dim], placement, len(parts), rank)
            if part.shape[placement.dim] != len(held):
                raise Disproved(f"{what}: rank {rank} has {tuple(part.shape)} where {placement} gives it {len(held)}")
            whole.index_copy_(placement.dim, torch.tensor(held), part)
        return whole
    if placement.state == "partial":
        return torch.stack(list(parts)).sum(0)
    for rank, part in enumerate(parts):
        if part.shape != like.shape or not torch.allclose(part, parts[0], rtol=TOLERANCE, atol=TOLERANCE):
            raise Disproved(f"{what}: rank {rank} has {tuple(part.shape)}, not the same as rank 0, in {placement}")
    return parts[0]


_DUAL = {"replicate": "replicate", "shared": "partial", "partial": "replicate", "shard": "shard"}


def gradient_placement(placement: Placement) -> Placement:
    """How the gradient of a value in this placement lies."""
    state: Any = _DUAL[placement.state]
    return Placement(state, placement.dim, placement.segments, placement.unit)


def execute(node: Node, arguments: Sequence[tuple[str, Any]], operands: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Run a node with these arguments, its tensors taken from ``operands`` in order."""
    queue = iter(operands)
    values = {name: _value(argument, queue, batch) for name, argument in arguments}
    if node.base == "getitem":
        return [values["input"]]
    name, _, overload = node.op.partition(".")
    result = getattr(getattr(torch.ops.aten, name), overload or "default")(**values)
    return [result] if isinstance(result, Tensor) else list(result)


def _value(argument: Any, queue: Any, batch: int) -> Any:
    if isinstance(argument, Ref):
        return next(queue)
    if isinstance(argument, BatchMultiple):
        return argument.factor * batch
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_value(item, queue, batch) for item in argument]
    return argument


def check(
    node: Node, strategy: OpStrategy, degree: int, operands: Sequence[Tensor], batch: int = 1,
    lockstep: Mapping[str, Lockstep] | None = None,
) -> None:
    """Raise :class:`Disproved` unless the strategy gives the whole operation's outputs and gradients.

    ``operands``: whole tensors, those with ``requires_grad`` are differentiated. ``lockstep``: by operation, forms in
    which the ranks exchange values within it; one that returns None leaves the strategy to the local operation.
    """
    whole = execute(node, node.arguments, operands, batch)
    parts = [
        [part.detach().requires_grad_(operand.requires_grad) for part in scatter(operand.detach(), placement, degree)]
        for operand, placement in zip(operands, strategy.operands, strict=True)
    ]
    held = [[operand[rank] for operand in parts] for rank in range(degree)]
    form = (lockstep or {}).get(node.base)
    together = form(node, strategy, held) if form else None
    locals_ = [[item] for item in together] if together is not None else [
        execute(node, localize(node, strategy, degree, rank), held[rank], batch) for rank in range(degree)
    ]
    for at, (output, placement) in enumerate(zip(whole, strategy.outputs, strict=True)):
        found = combine([outputs[at] for outputs in locals_], placement, output.detach(), f"{strategy.name}: output {at}")
        _compare(found, output, f"{node.op} {strategy.name}: output {at} as {placement}")
    _check_gradients(node, strategy, operands, whole, held, locals_)


def _check_gradients(
    node: Node, strategy: OpStrategy, operands: Sequence[Tensor], whole: Sequence[Tensor],
    held: Sequence[Sequence[Tensor]], locals_: Sequence[Sequence[Tensor]],
) -> None:
    wanted = [at for at, operand in enumerate(operands) if operand.requires_grad]
    carrying = [at for at, output in enumerate(whole) if output.requires_grad]
    if not wanted or not carrying:
        return
    degree = len(held)
    given = [torch.randn_like(whole[at]) for at in carrying]
    expected = torch.autograd.grad(
        [whole[at] for at in carrying], [operands[at] for at in wanted], given, allow_unused=True
    )
    pieces = [
        scatter(gradient, gradient_placement(strategy.outputs[at]), degree)
        for at, gradient in zip(carrying, given, strict=True)
    ]
    # All ranks in one pass: ranks that exchange values inside an operation are linked, others are not.
    gradients = torch.autograd.grad(
        [outputs[at] for outputs in locals_ for at in carrying], [parts[at] for parts in held for at in wanted],
        [piece[rank] for rank in range(degree) for piece in pieces], allow_unused=True,
    )
    for place, (at, right) in enumerate(zip(wanted, expected, strict=True)):
        own = [
            torch.zeros_like(parts[at]) if gradient is None else gradient
            for parts, gradient in zip(held, gradients[place::len(wanted)], strict=True)
        ]
        placement = gradient_placement(strategy.operands[at])
        what = f"{node.op} {strategy.name}: gradient of operand {at} as {strategy.operands[at]}"
        like = operands[at].detach()
        _compare(combine(own, placement, like, what), torch.zeros_like(like) if right is None else right, what)


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Disproved(f"{what}: {found.dtype}{tuple(found.shape)} instead of {expected.dtype}{tuple(expected.shape)}")
    tolerance = SINGLE_TOLERANCE if found.dtype == torch.float32 else TOLERANCE
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        worst = (found.double() - expected.double()).abs().max().item()
        raise Disproved(f"{what}: off by {worst:.3g}")
