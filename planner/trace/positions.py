"""What follows from a sample's place in the batch alone (``torch.arange(len(x))``), worked out for small batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.types import Ref
from planner.trace.constants import Constants
from planner.trace.dtypes import CONSTANT
from planner.trace.flat import FlatGraph
from planner.trace.interpret import execute
from planner.trace.order import PLAIN, Order, batch_dims, factor, orders

BATCHES = (2, 3)
"""A prime and another: no rule for one gives the other's samples."""
ELEMENTS = 1 << 22
"""What is larger is not worked out."""


class Positions:
    """Values that depend on neither parameters nor batch inputs, for several batches."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self._constants = {batch: _Constants(graph, batch) for batch in BATCHES}
        self._found: dict[tuple[str, Order | None], bool | None] = {}

    def uniform(self, name: str, order: Order | None) -> bool | None:
        """Whether a value is the same for every sample, where they lie in that order; None where that is not known."""
        if (name, order) not in self._found:  # a mask is read by every layer
            self._found[name, order] = self._uniform(name, order)
        return self._found[name, order]

    def _uniform(self, name: str, order: Order | None) -> bool | None:
        type_ = self.graph.type_of(name)
        dims = batch_dims(type_)
        if dims and (order is None or factor(type_, dims[0]) != order.factor):
            order = PLAIN if factor(type_, dims[0]) == 1 else None
        if len(dims) > 1 or (dims and order is None):
            return None
        first: Tensor | None = None
        for batch in BATCHES:
            value = self._constants[batch].value(name)
            if value is None:
                return None
            if dims and order is not None:
                value = value.movedim(dims[0], 0).unflatten(0, (order.outer, batch, order.inner)).movedim(1, 0)
                if not torch.equal(value, value[:1].expand_as(value)):
                    return False
                value = value[0]
            if first is not None and not torch.equal(first, value):
                return False
            first = value
        return True

    def picked(self, index: str, among: Iterable[Order]) -> tuple[tuple[Order, Order], ...] | None:
        """Orders (of a dim that ``index`` points into, of the index itself) by which every position points into its own sample;
        None where the index is not known, or the same for whatever batch."""
        type_ = self.graph.type_of(index)
        dims = batch_dims(type_)
        values = [self._constants[batch].value(index) for batch in BATCHES]
        if len(dims) != 1 or any(value is None or not value.numel() or value.dtype == torch.bool for value in values):
            return None
        rows = [value.movedim(dims[0], 0).flatten(1) for value in values if value is not None and value.dim() > 1]
        rows = rows or [value.unsqueeze(1) for value in values if value is not None]
        return tuple((into, own) for into in among for own in orders(factor(type_, dims[0])) if _own(rows, into, own))


def _own(rows: Iterable[Tensor], into: Order, own: Order) -> bool:
    """Whether positions in the order ``own`` point into their own sample of a dim in the order ``into``."""
    for value, batch in zip(rows, BATCHES, strict=True):
        sample = value % (into.factor * batch) // into.inner % batch
        expected = torch.arange(len(value)) // own.inner % batch
        if not bool((sample == expected.unsqueeze(1)).all()):
            return False
    return True


class _Constants(Constants):
    """As many samples as one says; what takes but a tensor's shape needs not its values."""

    def __init__(self, graph: FlatGraph, batch: int) -> None:
        super().__init__(graph)
        self.batch = batch

    def value(self, name: str) -> Tensor | None:
        for node in reversed(self._behind(name)):
            if node.base in CONSTANT:
                self._fill(node)
        return super().value(name)

    def _behind(self, name: str) -> list[Node]:
        found: dict[str, Node] = {}
        pending = [name]
        while pending:
            current = pending.pop()
            node = self.graph.by_name.get(current)
            if node is not None and current not in found and current not in self.known:
                found[current] = node
                pending.extend(node.operands if node.base not in CONSTANT else ())
        return [*found.values()]

    def _fill(self, node: Node) -> None:
        """Work out what is made with the shape of another value."""
        shape, *_ = (value.name for _, value in node.arguments if isinstance(value, Ref))
        sizes = self.graph.type_of(shape).sizes(self.batch)
        if node.name not in self.known and node.type.elements(self.batch) <= ELEMENTS:
            like = torch.empty(1, dtype=getattr(torch, self.graph.type_of(shape).dtype)).expand(sizes)
            self.known[node.name] = execute(node, {shape: like}, self.batch)

    def _evaluate(self, node: Node) -> Tensor | tuple[Tensor, ...] | None:
        operands = {name: self.known[name] for name in node.operands}
        if any(value is None for value in operands.values()) or any(t.elements(self.batch) > ELEMENTS for t in node.types):
            return None
        result = execute(node, operands, self.batch)
        return tuple(result) if isinstance(result, (list, tuple)) else result
