"""What a loss divides by: weights without what keeps them from zero, or of a shape alone, and factors that divide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.inlining import DRAWN
from planner.ir.types import Dtype, Ref
from planner.trace.additive import is_fixed
from planner.trace.flat import FlatGraph

GUARDS = frozenset({"clamp", "clamp_min", "add"})
NOTHING = 1e-6
"""What is added to a count to keep a quotient a number, at most."""
_FILLED = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}


def of_the_batch(graph: FlatGraph, weights: Sequence[str]) -> FlatGraph:
    """The graph with weights that come from no value of which they have but the shape (``torch.ones_like(terms)``,
    ``torch.rand_like(terms) < 0.2``)."""
    behind, nodes = set(weights), list[Node]()
    for node in reversed(graph.nodes):
        made = _of_its_shape(node) if node.name in behind else [node]
        if node.name in behind:
            behind.update(made[0].operands)
        nodes += made
    return replace(graph, nodes=tuple(reversed(nodes)))


def _of_its_shape(node: Node) -> list[Node]:
    """The node, and before it in the graph what it is made like, where it has but the shape of its operand."""
    size, dtype = ("size", node.type.shape), ("dtype", Dtype(node.type.dtype))
    fill = dict(node.arguments).get("fill_value", _FILLED.get(node.base))
    if node.base in (*_FILLED, "full_like", "new_full") and not isinstance(fill, Ref):
        return [replace(node, op="full", arguments=(size, ("fill_value", fill), dtype))]
    if node.base not in DRAWN:
        return [node]
    like = replace(node, name=f"{node.name}_of_shape", op="empty.memory_format", arguments=(size, dtype))
    drawn = tuple((key, Ref(like.name) if key == "self" else value) for key, value in node.arguments)
    return [replace(node, arguments=drawn), like]


def unguarded(graph: FlatGraph, weight: str) -> str:
    """A weight without what keeps it from zero (``clamp(min=1)``, ``+ 1e-8``), where it counts: a step divides by no weight
    of zero, and whole numbers above it are at least one."""
    node = graph.by_name.get(weight)
    if node is None or not node.operands or not _guards(node) or not _counts(graph, node.operands[0]):
        return weight
    return unguarded(graph, node.operands[0])


def _guards(node: Node) -> bool:
    arguments = dict(node.arguments)
    if node.base in ("clamp", "clamp_min"):
        least = arguments["min"]
        return isinstance(least, (int, float)) and 0 < least <= 1 and arguments.get("max") is None
    added = arguments.get("other")
    return node.op == "add.Tensor" and isinstance(added, float) and 0 < added <= NOTHING and arguments.get("alpha", 1) == 1


def _counts(graph: FlatGraph, name: str) -> bool:
    """Whether a value is how many elements are true, whatever its dtype."""
    node = graph.by_name.get(name)
    if node is None or not node.operands:
        return graph.type_of(name).dtype == "bool"
    if node.base in ("detach", "sum", "to", *GUARDS):
        return _counts(graph, node.operands[0])
    return node.base == "count_nonzero" or node.type.dtype == "bool"


def inverse(graph: FlatGraph, name: str) -> tuple[str, float] | None:
    """What of the batch a scalar is the inverse of, and what times that (``1 / n``, ``n ** -1``); None where it is none."""
    node = graph.by_name.get(name)
    if node is None or not node.operands or node.type.shape != () or is_fixed(graph, name):
        return None
    arguments = dict(node.arguments)
    value, other = arguments.get("self"), arguments.get("other")
    if not isinstance(value, Ref):
        return None
    if node.base == "reciprocal" or (node.base == "pow" and arguments.get("exponent") == -1):
        return value.name, 1
    if node.base in ("detach", "to") or (node.op == "mul.Tensor" and isinstance(other, (int, float))):
        found = inverse(graph, value.name)
        return found and (found[0], found[1] * (other if isinstance(other, (int, float)) else 1))
    return None


def divides_inside(graph: FlatGraph, name: str) -> bool:
    """Whether terms are divided by a total of the batch, each or a factor of theirs."""
    node = graph.by_name.get(name)
    if node is None or node.base not in ("div", "mul", "unsqueeze", "expand", "to"):
        return False
    other = dict(node.arguments).get("other")
    if node.op == "div.Tensor" and isinstance(other, Ref) and not graph.type_of(other.name).shape:
        return not is_fixed(graph, other.name)
    return any(divides_inside(graph, operand) for operand in node.operands)
