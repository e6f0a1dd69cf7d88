"""What of a loss is a sum over the batch, and what is the same whatever the batch."""

from __future__ import annotations

from planner.ir.body import Node
from planner.ir.inlining import draws
from planner.ir.types import BatchMultiple, Ref
from planner.trace.dtypes import CONSTANT
from planner.trace.flat import FlatGraph

MEAN, SUM = 1, 2  # torch's numbers of the reductions
ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})
"""What terms are added up from."""
LINEAR = frozenset({"mul", "detach", "div", "neg", "to", "reshape", "squeeze", "unsqueeze", "sum"})  # by a number, where by any
ADDING = frozenset({"add", "sub", "stack", "cat"})


def added_up(graph: FlatGraph, *, scaling: bool = False) -> frozenset[str]:
    """The scalars that add others, each a sum over the batch itself, up to the sum of a separated loss; ``scaling``: and those
    that scale them."""
    found, pending = set[str](), list(graph.outputs)
    while pending:
        node = graph.by_name.get(pending.pop())
        if node is not None and node.type.shape == () and node.base in LINEAR | ADDING:
            found.update([node.name] if scaling or node.base in ADDING else [])
            pending.extend(node.operands)
    return frozenset(found)


def is_fixed(graph: FlatGraph, name: str) -> bool:
    """Whether a scalar is the same whatever the batch: made of parameters and numbers, without a draw (a learned weight of a
    task, a penalty on parameters)."""
    if graph.type_of(name).shape != ():
        return False
    pending, seen = [name], set[str]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = graph.by_name.get(current)
        if node is None:
            if current.startswith("batch:"):
                return False
            continue
        extents = (extent for type_ in node.types for extent in type_.shape)
        if draws(node) or any(isinstance(value, BatchMultiple) for value in (*extents, *dict(node.arguments).values())):
            return False
        if node.base not in CONSTANT:
            pending.extend(node.operands)
    return True


def is_additive(graph: FlatGraph, name: str) -> bool:
    """Whether a scalar of parts of a batch adds up to that of the whole."""
    return name in graph.by_name and graph.by_name[name].type.shape == () and not_additive(graph, name) is None


def not_additive(graph: FlatGraph, name: str) -> Node | None:
    """The node for which a value of parts of a batch does not add up to that of the whole; None where it does."""
    node = graph.by_name[name]
    arguments = dict(node.arguments)
    if node.op == "full" and (isinstance(fill := arguments["fill_value"], BatchMultiple) or fill == 0):
        return None
    if node.base in ZEROS:
        return None
    summing = node.base in ("sum", "count_nonzero") or arguments.get("reduction") == SUM
    if (scaled := scaled_by_fixed(graph, node)) is not None:
        return not_additive(graph, scaled) if scaled in graph.by_name else node
    linear = (node.base in LINEAR and len(node.operands) == 1) or node.base in ADDING
    added = [value for key, value in node.arguments if key == "other" and node.base in ADDING]
    plain = all(isinstance(value, (Ref, tuple)) or value == 0 for value in added)
    if not node.operands or not (summing or (linear and plain)):
        return node
    for operand in node.operands if linear else node.operands[:1]:
        inside = graph.type_of(operand).shape
        if summing and any(isinstance(extent, BatchMultiple) for extent in inside):
            continue
        culprit = not_additive(graph, operand) if operand in graph.by_name else node
        if culprit is not None:
            return culprit
    return None


def scaled_by_fixed(graph: FlatGraph, node: Node) -> str | None:
    """What a product, or a quotient, of two scalars scales by a fixed one; None where it is no such."""
    if node.op not in ("mul.Tensor", "div.Tensor") or node.type.shape != ():
        return None
    first, second = (dict(node.arguments)[key] for key in ("self", "other"))
    if not isinstance(first, Ref) or not isinstance(second, Ref):
        return None
    if is_fixed(graph, second.name):
        return first.name
    return second.name if node.base == "mul" and is_fixed(graph, first.name) else None
