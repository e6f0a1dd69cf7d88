"""Parameters that lie in another's memory: one of them trains what the other has, and a program would have both."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from planner.ir.errors import ModelError
from planner.trace.recipes import Recorder


def refuse_shared_memory(module: nn.Module, where: str, recorder: Recorder) -> None:
    """Raise ModelError where a parameter has a number in memory that another one, or a buffer, has too, and one of them is
    trained. Parts of one tensor that have none in common (``w[:4]`` and ``w[4:]``) are parameters of their own. Of two that
    are not trained nothing parts the numbers, but where a program draws each by its name."""
    lying: dict[int, list[tuple[str, Tensor]]] = {}
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.numel() == 0 or tensor.layout is not torch.strided:
            continue
        others = lying.setdefault(tensor.untyped_storage()._cdata, [])
        for other, before in others:
            if not isinstance(before, nn.Parameter) or _apart(before, tensor):
                continue
            both = isinstance(tensor, nn.Parameter)
            if before.requires_grad or (both and tensor.requires_grad):
                raise ModelError(where, *_said(other, fqn, both))
            drawn = recorder.history(before).draw is not None
            if both and drawn and recorder.numbers(before) != recorder.numbers(tensor):
                wrong = f"parameters {other} and {fqn} are different parts of one random draw, in the same memory"
                raise ModelError(where, wrong, "what is a part or a transpose of a parameter is computed in forward")
        others.append((fqn, tensor))


def _said(first: str, second: str, both: bool) -> tuple[str, str]:
    if both:
        return (f"parameters {first} and {second} lie in the same memory, and are no one parameter",
                "assign the same Parameter (b.weight = a.weight), or give the second a copy (.clone()); what it is a part or a "
                "transpose of is computed in forward")
    return (f"buffer {second} lies in the memory of parameter {first}, which training changes",
            "compute it of the parameter in forward (.detach()), or give the buffer a copy (.clone())")


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage surely have no number in common: behind one another, or parts of one tensor."""
    first, second = sorted((one, other), key=Tensor.storage_offset)
    gap = int(second.storage_offset() - first.storage_offset())
    if first.element_size() != second.element_size():
        return False
    if gap > sum((extent - 1) * step for extent, step in zip(first.shape, first.stride(), strict=True)):
        return True
    if first.stride() != second.stride():
        return False
    steps = sorted((step, at) for at, step in enumerate(first.stride()) if step)
    span = 0  # of the dims that lie within one step of the next
    for step, at in steps:
        if span >= step:
            return False
        span += step * (max(first.shape[at], second.shape[at]) - 1)
    return not _meet(gap, [(step, first.shape[at], second.shape[at]) for step, at in reversed(steps)])


def _meet(gap: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether some place of a tensor is one of another that begins so many numbers later. ``dims``: step and both extents, the
    largest step first, which what lies within it does not fill."""
    if not dims:
        return gap == 0
    (step, first, second), *inner = dims
    return any(-second < steps < first and _meet(gap - steps * step, inner) for steps in (gap // step, gap // step + 1))
