"""Pass 6b: half precisions' losses and weights are summed in float32.

A half has 8 or 11 bits: a sum of thousands of terms keeps none of the later ones, and float16 ends at 65,504. Whatever is
summed over the batch, and what follows, is therefore float32; the terms are as the model made them. Cross-entropy of plain
labels is left as it is: the runtime's own (runtime/vocabulary.py) computes in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.types import Argument, Dtype, Ref
from planner.trace.additive import ADDING, LINEAR, SUM, is_fixed
from planner.trace.canonical import substitute
from planner.trace.flat import FlatGraph
from planner.trace.halves import HALF, WIDE, wide_copy


def widen_loss(graph: FlatGraph) -> FlatGraph:
    """The graph whose sums over the batch are float32 where they were half."""
    wider: dict[str, tuple[Node, ...]] = {}
    pending = list(graph.outputs)
    while pending:
        name = pending.pop()
        if name in graph.by_name and name not in wider:
            wider[name], following = _widened(graph, graph.by_name[name])
            pending.extend(following)
    nodes = tuple(made for node in graph.nodes for made in wider.get(node.name, (node,)))
    return replace(graph, nodes=nodes)


def _widened(graph: FlatGraph, node: Node) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """What takes the node's place, and the values before it that are sums over the batch too."""
    arguments = dict(node.arguments)
    if not node.type.floating or (node.base == "cross_entropy_loss" and _of_plain_labels(graph, node)):
        return (node,), ()
    inner = tuple(name for name in node.operands if not graph.type_of(name).batched and not is_fixed(graph, name))
    if node.base == "sum":
        half = node.type.dtype in HALF
        return ((_retyped(node, {"dtype": Dtype(WIDE)}),) if half else (node,)), inner
    if arguments.get("reduction") == SUM:
        return _on_wide_operands(graph, node), ()
    if node.base in LINEAR | ADDING:
        return (_retyped(node, {"dtype": Dtype(WIDE)} if node.base == "to" else {}),), inner
    return (node,), ()


def _of_plain_labels(graph: FlatGraph, node: Node) -> bool:
    """Whether a cross-entropy weighs all labels alike, and knows no other for a row."""
    arguments = dict(node.arguments)
    target = arguments["target"]
    soft = isinstance(target, Ref) and graph.type_of(target.name).floating
    return not soft and arguments["weight"] is None and not arguments["label_smoothing"]


def _retyped(node: Node, changed: Mapping[str, Argument]) -> Node:
    if node.type.dtype not in HALF:
        return node
    arguments = tuple((key, changed.get(key, value)) for key, value in node.arguments)
    return replace(node, arguments=arguments, types=(replace(node.type, dtype=WIDE),))


def _on_wide_operands(graph: FlatGraph, node: Node) -> tuple[Node, ...]:
    """The operation on casts of its half operands."""
    casts: dict[str, Node] = {}
    for name in dict.fromkeys(node.operands):
        if graph.type_of(name).dtype in HALF:
            casts[name] = wide_copy(graph, name, f"{node.name}_operand_{len(casts)}", node)
    wide = substitute(node, {name: cast.name for name, cast in casts.items()})
    return (*casts.values(), _retyped(wide, {}))
