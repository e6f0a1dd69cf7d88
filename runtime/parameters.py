"""Held: one parameter as this rank holds it, through both splits: the tensor axis' layout and ZeRO's rows of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .block import blocks_of
from .layout import Box, Layout


@dataclass(frozen=True)
class Held:
    """``fqn``: the user's name. ``parameter``: plain, or a DTensor over the data mesh once ZeRO is applied.

    ``partial_gradient``: the gradient is to be summed over the tensor axis once a step. ``copies``: how many stages
    hold a copy (a parameter tied across stages).
    """

    fqn: str
    parameter: nn.Parameter
    layout: Layout
    tensor_rank: int
    partial_gradient: bool
    copies: int = 1

    @property
    def local(self) -> Tensor:
        """The elements on this rank; shares memory with the parameter."""
        return local_of(self.parameter).detach()

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the elements on this rank; shares memory with ``parameter.grad``."""
        return None if self.parameter.grad is None else local_of(self.parameter.grad)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Where the elements on this rank lie in the whole tensor and in :attr:`local`; empty boxes are left out."""
        first, rows = rows_of(self.parameter)
        return tuple(cut(box, first, rows) for box in self.layout.boxes(self.tensor_rank) if overlaps(box, first, rows))

    @property
    def replication(self) -> int:
        """How many ranks hold each element, copies in other stages counted."""
        tensor = 1 if self.layout.sharded else self.layout.degree
        return tensor * data_replication(self.parameter) * self.copies


def local_of(tensor: Tensor) -> Tensor:
    """A DTensor's local part, apart from any graph, or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # Otherwise a function of autograd is made, which takes the host as long as ten kernels.
        return tensor.to_local()


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """(first row, rows) that are on this rank: FSDP2 gives each rank ``ceil(rows / ranks)`` while they last."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            each = -(-rows // tensor.device_mesh.size(axis))
            first = min(tensor.device_mesh.get_local_rank(axis) * each, rows)
            return first, min(each, rows - first)
    return 0, rows


def data_replication(tensor: Tensor) -> int:
    """How many data ranks hold the same rows."""
    if not isinstance(tensor, DTensor):
        return 1
    replicas = 1
    for axis, placement in enumerate(tensor.placements):
        replicas *= 1 if isinstance(placement, Shard) else tensor.device_mesh.size(axis)
    return replicas


def overlaps(box: Box, first: int, rows: int) -> bool:
    """Whether a box of the tensor-axis part has rows in [first, first + rows)."""
    _, sizes, local = box
    if not sizes:
        return rows > 0
    return max(local[0], first) < min(local[0] + sizes[0], first + rows) and 0 not in sizes


def cut(box: Box, first: int, rows: int) -> Box:
    """A box of the tensor-axis part narrowed to rows [first, first + rows), local offsets counted from ``first``."""
    offsets, sizes, local = box
    if not sizes:
        return box
    begin, end = max(local[0], first), min(local[0] + sizes[0], first + rows)
    skipped = begin - local[0]
    return (offsets[0] + skipped, *offsets[1:]), (end - begin, *sizes[1:]), (begin - first, *local[1:])


def piece(local: Tensor, box: Box) -> Tensor:
    """The view of a local tensor that a box names; a box without dims names the one element that there is."""
    _, sizes, offsets = box
    if not sizes:
        return local.reshape(())
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(dim, start, length)
    return local


def held_by(modules: Iterable[nn.Module], tied: Sequence[TiedParameter] = ()) -> tuple[Held, ...]:
    """Every parameter of the rank's stage modules, once per tensor; ``tied``: those that several stages hold."""
    copies = {entry.fqn: len(entry.stages) for entry in tied}
    seen: set[int] = set()
    result = []
    for module in modules:
        for block in blocks_of(module):
            for declaration, parameter in block.entries():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    result.append(Held(
                        declaration.fqn, parameter, declaration.layout, block.tensor.rank,
                        declaration.partial_gradient, copies.get(declaration.fqn, 1),
                    ))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several stages hold a copy of: its name and the stages' indices, ascending. ``untrained``: those of them
    that make no gradient of it (only detached values come from it there)."""

    fqn: str
    stages: tuple[int, ...]
    untrained: tuple[int, ...] = ()


def require_gradients(parameters: Sequence[Held]) -> None:
    """Raise RuntimeError where a trained parameter has received no gradient: something silently lost it."""
    missing = [
        held.fqn for held in parameters
        if held.parameter.requires_grad and held.gradient is None and held.local.numel()
    ]
    if missing:
        raise RuntimeError(f"no gradient reached {', '.join(missing[:5])} ({len(missing)} in all)")


def zero_gradients(parameters: Sequence[Held]) -> None:
    """Forget all gradients."""
    for held in parameters:
        held.parameter.grad = None


def as_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name such as ``float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
