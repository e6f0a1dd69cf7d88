"""Pass 5: operations on flattened leading dims act on the dims themselves.

``mm(reshape(x, [N, k]), w)`` becomes ``matmul(x, w)``; what treats all rows alike (a bias, a pointwise operation, a
softmax over the columns) follows without flattening, and the reshape back cancels. The flattened form hides its dims: a
value that is sharded by sequence, or by head, cannot pass through [batch x sequence, k]. Row-major order makes every
step exact. An operation that does not treat rows alike reads them flattened, as before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from planner.ir.body import Node
from planner.ir.types import Argument, BatchMultiple, Extent, Ref, TensorType
from planner.trace.canonical import prune, substitute
from planner.trace.flat import FlatGraph
from planner.trace.interpret import operation

Shape = tuple[Extent, ...]

PRODUCTS = frozenset({"mm", "linear", "matmul"})
"""Rows of the first operand times a matrix (or a vector) that all rows share."""

NORMS = frozenset({"layer_norm", "rms_norm"})

ELEMENTWISE = frozenset({"to", "contiguous", "dropout", "detach", "hardswish", "log_sigmoid"})
"""Elementwise in their only tensor, without torch's tag that says so."""

ALONG: Mapping[str, tuple[str, ...]] = {
    "softmax": ("dim",), "log_softmax": ("dim",), "split": ("dim",), "split_with_sizes": ("dim",), "chunk": ("dim",),
    "unbind": ("dim",), "slice": ("dim",), "narrow": ("dim",), "select": ("dim",), "sum": ("dim",), "mean": ("dim",),
    "amax": ("dim",), "amin": ("dim",), "glu": ("dim",), "cumsum": ("dim",), "transpose": ("dim0", "dim1"),
}
"""Along the dims that these arguments name: rows are treated alike where none of those is the rows' own."""


def unflatten(graph: FlatGraph) -> FlatGraph:
    """The same graph with trained values in the dims that they had before their leading dims were flattened."""
    return _Unflattener(graph).rewrite()


def flattened_dims(shape: Shape, flat: Shape) -> Shape:
    """The leading dims of ``shape``, two or more beside those of size one, that ``flat`` has as its first one; else ().

    Of several answers (dims of size one) the one that leaves the other dims as they are, else the shortest.
    """
    counts = [n for n in range(2, len(shape) + 1) if flat and sum(extent != 1 for extent in shape[:n]) > 1
              and _product(shape[:n]) == _product(flat[:1]) and _product(shape[n:]) == _product(flat[1:])]
    exact = [n for n in counts if shape[n:] == flat[1:]]
    return shape[:(exact or counts)[0]] if counts else ()


def _product(shape: Shape) -> tuple[int, int]:
    """Elements of a shape, as a factor and the power of the batch."""
    batches = sum(isinstance(extent, BatchMultiple) for extent in shape)
    return math.prod(extent.factor if isinstance(extent, BatchMultiple) else extent for extent in shape), batches


@dataclass(frozen=True)
class _Unflattened:
    """A value by the name of its unflattened form, and the dims that its rows had."""

    name: str
    rows: Shape


class _Unflattener:
    """Rewrites node by node; knows the unflattened form of every flattened value so far."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.types: dict[str, tuple[TensorType, ...]] = {name: (type_,) for name, type_ in graph.inputs.items()}
        self.gradients = set(graph.trainable)
        self.unflattened: dict[str, _Unflattened] = {}
        self.renamed: dict[str, str] = {}
        self.used = {node.name for node in graph.nodes}

    def rewrite(self) -> FlatGraph:
        for original in self.graph.nodes:
            node = substitute(original, self.renamed)
            if node.op == "reshape":
                self._reshape(node)
            elif not self._follow(node):
                self._emit(node)
        outputs = tuple(self.renamed.get(name, name) for name in self.graph.outputs)
        return prune(replace(self.graph, nodes=tuple(self.nodes), outputs=outputs))

    def _emit(self, node: Node) -> str:
        self.nodes.append(node)
        self.types[node.name] = node.types
        if node.differentiable:
            self.gradients.add(node.name)
        return node.name

    def _emit_reshape(self, origin: Node, name: str, value: str, shape: Shape) -> str:
        """``value`` in another shape, on behalf of ``origin``; itself where it has that shape."""
        (type_,) = self.types[value]
        if type_.shape == shape:
            return value
        return self._emit(Node(name, "reshape", (("self", Ref(value)), ("shape", shape)), (replace(type_, shape=shape),),
                               origin.module, origin.source, value in self.gradients))

    def _fresh(self, name: str) -> str:
        while name in self.used:
            name += "_"
        self.used.add(name)
        return name

    def _reshape(self, node: Node) -> None:
        """Read the unflattened value; where that is what comes out, no reshape is left."""
        operand = node.operands[0]
        source = self.unflattened[operand].name if operand in self.unflattened else operand
        if self._emit_reshape(node, node.name, source, node.type.shape) == source:
            self.renamed[node.name] = source
            return
        rows = flattened_dims(self.types[source][0].shape, node.type.shape) if node.differentiable else ()
        if rows:
            name = self._emit_reshape(node, self._fresh(f"{node.name}_rows"), source, (*rows, *node.type.shape[1:]))
            self.unflattened[node.name] = _Unflattened(name, rows)

    def _follow(self, node: Node) -> bool:
        """Emit the node on unflattened operands, where it has some and treats their rows alike."""
        rows = next((self.unflattened[name].rows for name in node.operands if name in self.unflattened), ())
        flat = self._flat_operands(node, rows) if rows else ()
        arguments = _shifted(node, self.types[flat[0]][0].rank, len(rows)) if flat else ()
        if not flat or not arguments:
            return False
        operands = {name: self._in_rows(node, name, rows) for name in dict.fromkeys(flat)}
        types = tuple(replace(type_, shape=(*rows, *type_.shape[1:])) for type_ in node.types)
        name = self._fresh(f"{node.name}_rows")
        made = substitute(replace(node, name=name, arguments=arguments, types=types), operands)
        if node.op in ("mm", "bmm"):
            made = replace(made, op="matmul", arguments=tuple(zip(("self", "other"), dict(made.arguments).values())))
        self._emit(made)
        self.unflattened[node.name] = _Unflattened(name, rows)
        self.types[node.name] = node.types
        if len(types) == 1:
            self._emit_reshape(node, node.name, name, node.type.shape)
        return True

    def _flat_operands(self, node: Node, rows: Shape) -> tuple[str, ...]:
        """The operands whose first dim is the rows', if the node treats all rows alike and its results keep them."""
        names = node.operands
        count = _product(rows)
        if any(not type_.rank or _product(type_.shape[:1]) != count for type_ in node.types):
            return ()
        if node.op == "getitem" or node.base in (*ELEMENTWISE, *ALONG):
            return names[:1] if len(names) == 1 else ()
        ranks = [self.types[name][0].rank for name in names]
        if node.base in PRODUCTS or node.base in NORMS:
            alone = names[0] in self.unflattened and names[0] not in names[1:]
            return names[:1] if alone and _shares(node, ranks) else ()
        having = tuple(name for name, rank in zip(names, ranks, strict=True)
                       if rank == node.type.rank and _product(self.types[name][0].shape[:1]) == count)
        if node.op == "bmm":
            return having if len(having) == 2 else ()
        pointwise = "::" not in node.op and torch.Tag.pointwise in operation(node.op).tags
        return having if pointwise and any(name in self.unflattened for name in having) else ()

    def _in_rows(self, node: Node, name: str, rows: Shape) -> str:
        """An operand in these rows, unflattened already or now."""
        found = self.unflattened.get(name)
        if found is not None and found.rows == rows:
            return found.name
        source = found.name if found else name
        return self._emit_reshape(node, self._fresh(f"{node.name}_rows"), source, (*rows, *self.types[name][0].shape[1:]))


def _shares(node: Node, ranks: Sequence[int]) -> bool:
    """Whether a product or a norm does the same to every row."""
    if node.base in PRODUCTS:
        return ranks[0] == 2 and ranks[1] <= 2
    normalized = node.argument("normalized_shape")
    return isinstance(normalized, tuple) and len(normalized) < ranks[0]


def _shifted(node: Node, rank: int, rows: int) -> tuple[tuple[str, Argument], ...]:
    """The node's arguments, dims counted after the rows; () where one of them is the rows' own or cannot be told."""
    named = ALONG.get(node.base, ())
    arguments = dict(node.arguments)
    for key in named:
        value = arguments.get(key)
        dims = value if isinstance(value, tuple) else (value,)
        if not dims or not all(isinstance(dim, int) and dim % rank for dim in dims):
            return ()
        moved = tuple(dim + rows - 1 if isinstance(dim, int) and dim > 0 else dim for dim in dims)
        arguments[key] = moved if isinstance(value, tuple) else moved[0]
    return tuple(arguments.items())
