"""One form of what gives dims another order: ``transpose`` where two change places, else ``permute``."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.body import Node
from planner.ir.types import Argument, Ref

TURNS = frozenset({"mT", "matrix_H", "adjoint", "movedim", "moveaxis", "numpy_T", "swapaxes", "swapdims", "t"})


def turned(node: Node, rank: int) -> Node:
    """A node of :data:`TURNS`, of an operand of that rank."""
    order = _order(node, rank)
    moved = tuple(at for at, dim in enumerate(order) if at != dim)
    operand: tuple[str, Argument] = ("self", Ref(node.operands[0]))
    if len(moved) == 2:
        return replace(node, op="transpose.int", arguments=(operand, ("dim0", moved[0]), ("dim1", moved[1])))
    return replace(node, op="permute", arguments=(operand, ("dims", order)))


def _order(node: Node, rank: int) -> tuple[int, ...]:
    """For each dim of the result, which of the operand it is."""
    order = list(range(rank))
    if node.base == "numpy_T":
        return tuple(reversed(order))
    if node.base in ("movedim", "moveaxis"):
        source, target = (_dims(node.argument(name), rank) for name in ("source", "destination"))
        rest = iter(dim for dim in order if dim not in source)
        placed = dict(zip(target, source, strict=True))
        return tuple(placed[dim] if dim in placed else next(rest) for dim in order)
    one, two = rank - 2, rank - 1
    if node.base in ("swapaxes", "swapdims"):
        word = "axis" if node.base == "swapaxes" else "dim"
        (one,), (two,) = (_dims(node.argument(f"{word}{at}"), rank) for at in (0, 1))
    if rank > 1:
        order[one], order[two] = order[two], order[one]
    return tuple(order)


def _dims(said: Argument, rank: int) -> tuple[int, ...]:
    return tuple(dim % rank for dim in (said if isinstance(said, tuple) else (said,)) if isinstance(dim, int))
