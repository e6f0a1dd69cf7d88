"""The model's constants: the buffers that the graph reads, and those that only its state holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planner.ir.errors import ModelError
from planner.ir.graph import Buffer
from planner.ir.types import TensorType
from planner.trace.build import BuiltModel, type_of
from planner.trace.flat import FlatGraph
from planner.trace.recipes import encode


def values_of_buffers(graph: FlatGraph, used: Sequence[str], built: BuiltModel) -> tuple[Buffer, ...]:
    """The buffers that are read (``used``, FQNs), then the persistent ones that are not: each distinct value once, with
    every state key that holds it. Raises ModelError where a value that is read is not known."""
    for fqn in used:
        if fqn not in graph.values and "lifted_tensor" in fqn:
            raise ModelError(graph.where, "forward reads a tensor that is no parameter, no buffer and not traced",
                             "torch.autograd.grad and backward() in forward cannot be traced: write the derivative out, or use "
                             "torch.func.jvp; say .detach() for .data, and make any other tensor a buffer")
        if fqn not in graph.values:
            raise ModelError(graph.where, f"buffer {fqn} has no value known without its model's weights",
                             "compute it in the constructor from sizes alone")
    names = _state_keys(built)
    kept = [fqn for fqn in names if fqn in graph.values and fqn not in used]
    groups: dict[tuple[TensorType, str], list[str]] = {}
    for fqn in (*used, *kept):
        value = graph.values[fqn]
        groups.setdefault((type_of(value), encode(value)), []).append(fqn)
    fixed = {name.partition(":")[2] for name in graph.fixed}
    buffers = []
    for (type_, data), members in groups.items():
        keys = tuple(key for member in members for key in names.get(member, ()))
        read = [fqn for fqn in members if fqn in used]
        buffers += [
            Buffer(fqn, type_, data, keys if fqn == members[0] else (), any(member in fixed for member in members))
            for fqn in read or members[:1]
        ]
    return tuple(buffers)


def unknown_buffers(built: BuiltModel, used: Collection[str]) -> tuple[str, ...]:
    """What to say of persistent buffers that nothing reads and whose values are too large to be known."""
    return tuple(
        f"buffer {fqn} is too large for its value to be known: checkpoints will not hold it"
        for fqn in _state_keys(built) if fqn not in built.values and fqn not in used
    )


def _state_keys(built: BuiltModel) -> dict[str, tuple[str, ...]]:
    """The state keys of every persistent buffer, by its first name."""
    keys: dict[str, tuple[str, ...]] = {}
    for fqn in built.buffers:
        if fqn in built.persistent:
            first = built.canonical[fqn]
            keys[first] = (*keys.get(first, ()), fqn)
    return keys
