"""Pass 6a: scalars that a loss stacks before it adds them up are added one by one.

``torch.stack(losses).mean()``, or ``(torch.exp(-s) * torch.stack(losses) + s).sum()`` with learned weights ``s``: by
itself each scalar is an average, or a sum, of terms of its own. So is one that is taken out of a stack again
(``losses[0]``, ``sum(losses)``), or multiplied by a weight in a product of vectors (``torch.stack(losses) @ s``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planner.ir.body import Node
from planner.ir.types import Argument, Ref, TensorType
from planner.trace.additive import ADDING, LINEAR
from planner.trace.flat import FlatGraph

BY_ELEMENT = frozenset({"add", "clamp", "clamp_min", "div", "mul", "neg", "rsub", "sub", "to"})
"""What may be done with the stack: each works on every scalar alone."""
JOINS = frozenset({"cat", "stack"})
LIFTS = frozenset({"reshape", "unsqueeze"})
"""Of a scalar to a vector of one, of which several are joined (``a[None]``)."""
PRODUCTS = frozenset({"dot", "matmul"})


def unstack(graph: FlatGraph) -> FlatGraph:
    """The graph in which sums and means of stacked scalars, on the way to the loss, add these one by one, and one of them is
    itself."""
    taken = {node.name: _Apart(graph, node) for node in _reductions(graph)}
    if not taken:
        return graph
    nodes = (made for node in graph.nodes for made in (taken[node.name].nodes() if node.name in taken else (node,)))
    return replace(graph, nodes=tuple(nodes))


def _reductions(graph: FlatGraph) -> Iterator[Node]:
    """Of a vector of stacked scalars to a scalar, on the way to the loss."""
    pending, seen = list(graph.outputs), set[str]()
    while pending:
        node = graph.by_name.get(name := pending.pop())
        if node is None or name in seen or node.type.shape != ():
            continue
        seen.add(name)
        stacked = _reduced(graph, node)
        if stacked is not None:
            yield node
            pending.extend(scalar for name in _vectors(node) or (stacked,) for scalar in _scalars(graph, name))
        elif node.base in LINEAR | ADDING | {"mean", "rsub"}:
            pending.extend(node.operands)


def _reduced(graph: FlatGraph, node: Node) -> str | None:
    """The vector of stacked scalars that a node adds up, or takes one of; None where it does neither."""
    arguments = dict(node.arguments)
    operand = arguments.get("self")
    if node.op == "getitem":
        taken = graph.by_name.get(node.operands[0])
        operand = taken.argument("self") if taken is not None and taken.base == "unbind" else None
    adds = node.base in ("mean", "sum") and arguments.get("dtype") is None
    if vectors := _vectors(node):
        return next((name for name in vectors if _stacked(graph, name)), None)
    if not isinstance(operand, Ref) or not (adds or node.base in ("getitem", "select")):
        return None
    return operand.name if _stacked(graph, operand.name) else None


def _vectors(node: Node) -> tuple[str, ...]:
    """Those of which a node is the product."""
    return node.operands if node.base in PRODUCTS else ()


def _scalars(graph: FlatGraph, stacked: str) -> Iterator[str]:
    """What such a vector is made of."""
    node = graph.by_name.get(stacked)
    for operand in node.operands if node is not None else ():
        if not graph.type_of(operand).shape:
            yield operand
        elif _stacked(graph, operand):
            yield from _scalars(graph, operand)


def _stacked(graph: FlatGraph, name: str) -> bool:
    """Whether a vector is made of stacked scalars, element by element."""
    node = graph.by_name.get(name)
    if node is None or len(node.type.shape) != 1 or not isinstance(node.type.shape[0], int):
        return False
    if node.base == "stack" or (node.base in LIFTS and not graph.type_of(node.operands[0]).shape):
        return True
    return node.base in BY_ELEMENT | JOINS and any(_stacked(graph, operand) for operand in node.operands)


@dataclass
class _Apart:
    """A reduction of stacked scalars, and what takes its place."""

    graph: FlatGraph
    reduction: Node
    made: list[Node] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """The scalars, and their sum or mean under the reduction's name."""
        stacked = _reduced(self.graph, self.reduction)
        assert stacked is not None
        (count,) = self.graph.type_of(stacked).shape
        assert isinstance(count, int)
        one = dict(self.reduction.arguments).get("index")
        places = (one % count,) if isinstance(one, int) else tuple(range(count))
        total, *others = [self._part(stacked, index) for index in places]
        for other in others:
            total = self._add("add.Tensor", (("self", total), ("other", other), ("alpha", 1)), self.reduction)
        if not others or self.reduction.base == "mean":
            self._add("div.Tensor", (("self", total), ("other", len(others) + 1)), self.reduction)
        self.made[-1] = replace(self.made[-1], name=self.reduction.name)
        return self.made

    def _part(self, stacked: str, index: int) -> Ref:
        """What the reduction adds of one place."""
        vectors = _vectors(self.reduction)
        if not vectors:
            return self._element(stacked, index)
        one, other = (self._element(name, index) for name in vectors)
        return self._add("mul.Tensor", (("self", one), ("other", other)), self.reduction)

    def _element(self, name: str, index: int) -> Ref:
        """One scalar of a vector."""
        node = self.graph.by_name.get(name)
        if node is not None and node.base in LIFTS and not self.graph.type_of(node.operands[0]).shape:
            return Ref(node.operands[0])
        if node is not None and node.base == "cat":
            return self._of_joined(node, index)
        if node is None or node.base not in BY_ELEMENT | {"stack"}:
            arguments = (("self", Ref(name)), ("dim", 0), ("index", index))
            return self._add("select.int", arguments, node or self.reduction, self.graph.type_of(name))
        if node.base == "stack":
            return Ref(node.operands[index])
        return self._add(node.op, tuple((key, self._of(value, index)) for key, value in node.arguments), node)

    def _of_joined(self, node: Node, index: int) -> Ref:
        for operand in node.operands:
            (extent,) = self.graph.type_of(operand).shape
            assert isinstance(extent, int)
            if index < extent:
                return self._element(operand, index)
            index -= extent
        raise AssertionError(f"{node.name} has no element {index}")

    def _of(self, value: Argument, index: int) -> Argument:
        if isinstance(value, Ref) and self.graph.type_of(value.name).shape:
            return self._element(value.name, index if self.graph.type_of(value.name).shape != (1,) else 0)
        return value

    def _add(
        self, op: str, arguments: tuple[tuple[str, Argument], ...], origin: Node, type_: TensorType | None = None
    ) -> Ref:
        """A node that does with scalars what ``origin`` does with vectors. ``type_``: of these, where that is another's."""
        name = f"{self.reduction.name}_part_{len(self.made)}"
        dtype = (type_ or origin.type).dtype
        operands = [value.name for _, value in arguments if isinstance(value, Ref)]
        known = {node.name: node.differentiable for node in self.made}
        carries = any(known.get(operand, False) or self.graph.differentiable(operand) for operand in operands)
        self.made.append(Node(name, op, arguments, (TensorType((), dtype),), origin.module, origin.source, carries))
        return Ref(name)
