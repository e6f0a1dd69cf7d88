"""Bounds of whole numbers in the batch: what a model looks up or counts classes by, else what its example inputs show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.graph import BatchInput
from planner.ir.types import Argument, Extent, Ref, TensorType
from planner.trace.flat import FlatGraph, place

ROWS = {"embedding": "indices", "embedding_bag": "indices"}
"""Operations that look up rows of ``weight``, with the argument that says which."""
CLASSES = frozenset({"cross_entropy_loss", "multi_margin_loss", "nll_loss", "nll_loss_nd"})
ALONG = frozenset({"gather", "index_add", "index_copy", "index_select", "scatter", "scatter_add"})
"""Operations that read or write along ``dim`` where ``index`` says."""
AT_INDICES = frozenset({"index", "index_put"})
MOVES = frozenset({
    "chunk", "clone", "contiguous", "detach", "expand", "flip", "getitem", "narrow", "permute", "repeat", "repeat_interleave",
    "reshape", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "to", "transpose", "unbind", "unfold",
    "unsqueeze",
})
"""Operations whose result consists of elements of their first operand."""
JOINS = frozenset({"cat", "stack"})


def bounded(graph: FlatGraph) -> tuple[BatchInput, ...]:
    """The batch inputs, with the bound of values that index a table or name a class. The tokens of a file are the targets too,
    a place on: what bounds the ones bounds the others. Raises ModelError where there is nothing to choose from."""
    bounds = dict[str, int]()
    for node in graph.nodes:
        for indices, extent in _chosen(graph, node):
            if extent == 0:
                raise ModelError(place(node, graph.where), f"{node.base} has no rows or classes to choose from",
                                 "give it some")
            if isinstance(extent, int):
                bounds |= {name: min(extent, bounds.get(name, extent)) for name in _origins(graph, indices)}
    tokens = [given for given in graph.batch_inputs if given.role == "tokens"]
    for given in graph.batch_inputs:
        if given.role == "targets" and given.name in bounds:
            for other in tokens:
                if other.type.shape == given.type.shape:
                    bounds[other.name] = min(bounds[given.name], bounds.get(other.name, bounds[given.name]))
    return tuple(
        replace(given, high=bounds[given.name], shown=0) if given.name in bounds else given for given in graph.batch_inputs
    )


def _chosen(graph: FlatGraph, node: Node) -> Iterator[tuple[Argument, Extent]]:
    """Values that choose among so many."""
    arguments = dict(node.arguments)
    if node.base in ROWS:
        yield arguments[ROWS[node.base]], _type(graph, arguments["weight"]).shape[0]
    elif node.base in CLASSES and node.operands:
        shape = _type(graph, arguments["self"]).shape
        yield arguments["target"], shape[min(1, len(shape) - 1)]
    elif node.base == "one_hot":
        classes = arguments["num_classes"]
        if isinstance(classes, int):
            yield arguments["self"], classes
    elif node.base in ALONG:
        source, dim = _type(graph, arguments["self"]), arguments["dim"]
        if source.rank and isinstance(dim, int):
            yield arguments["index"], source.shape[dim]
    elif node.base in AT_INDICES:
        given = arguments["indices"]
        assert isinstance(given, tuple)
        found = {dim: item for dim, item in enumerate(given) if isinstance(item, Ref)}
        if not any(_type(graph, item).dtype in ("bool", "uint8") for item in found.values()):  # A mask may take several dims.
            yield from ((item, _type(graph, arguments["self"]).shape[dim]) for dim, item in found.items())


def _type(graph: FlatGraph, argument: Argument) -> TensorType:
    assert isinstance(argument, Ref)
    return graph.type_of(argument.name)


def _origins(graph: FlatGraph, argument: Argument) -> Iterator[str]:
    """The batch inputs of whole numbers among whose elements a value's are."""
    pending = [argument.name] if isinstance(argument, Ref) else []
    while pending:
        name = pending.pop()
        node = graph.by_name.get(name)
        if node is not None:
            pending.extend(node.operands[:1] if node.base in MOVES else node.operands if node.base in JOINS else ())
        elif name.startswith("batch:") and not graph.inputs[name].floating:
            yield name.partition(":")[2]
