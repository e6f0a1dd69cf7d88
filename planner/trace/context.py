"""Pass 8: part what depends on no parameter from what does, each such value computed once."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.inlining import DRAWN, draws
from planner.ir.types import TensorType, exact
from planner.trace.canonical import prune, substitute
from planner.trace.flat import FlatGraph


def split_context(graph: FlatGraph) -> FlatGraph:
    """Mark the parameter-free nodes as context and merge equal ones (rotary tables built anew in every layer), but for
    what is drawn at random: each draw is another, and those of a layer's own stay with it."""
    graph = _merge_buffers(graph)
    split = _split(graph, frozenset())
    own = _own_draws(split)
    return _split(graph, own) if own else split


def _own_draws(graph: FlatGraph) -> frozenset[str]:
    """Draws of the context all that comes of which is in the module that draws. (What they are like stays: it is one for
    all layers.)"""
    flow = nx.DiGraph((operand, node.name) for node in graph.nodes for operand in node.operands)
    own: set[str] = set()
    for node in graph.nodes:
        if node.name not in graph.context or node.base not in DRAWN or not node.module:
            continue
        computed = {node.name, *nx.descendants(flow.subgraph(graph.context), node.name)}
        readers = {reader for name in computed for reader in flow.successors(name)}
        within = all(f"{graph.by_name[name].module}.".startswith(f"{node.module}.") for name in readers)
        if within and computed.isdisjoint(graph.outputs):
            own.add(node.name)
    return frozenset(own)


def _split(graph: FlatGraph, own: frozenset[str]) -> FlatGraph:
    """``own``: draws that are none of the context all the same."""
    free = {name for name in graph.inputs if not name.startswith("parameter:")}
    seen: dict[object, str] = {}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    context: set[str] = set()
    for original in graph.nodes:
        node = substitute(original, renamed)
        if node.name not in own and all(operand in free for operand in node.operands):
            key = (node.op, tuple((name, exact(value)) for name, value in node.arguments), node.types)
            first = node.name if draws(node) else seen.setdefault(key, node.name)
            if first != node.name:
                renamed[node.name] = first
                continue
            free.add(node.name)
            context.add(node.name)
        nodes.append(node)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    split = prune(replace(graph, nodes=tuple(nodes), outputs=outputs, context=frozenset(context)))
    return replace(split, context=frozenset(context & {node.name for node in split.nodes}))


def _merge_buffers(graph: FlatGraph) -> FlatGraph:
    """Read buffers of equal contents under the first one's name."""
    distinct: dict[TensorType, list[str]] = {}
    renamed: dict[str, str] = {}
    for name, type_ in graph.inputs.items():
        value = _value(graph, name)
        if value is None:
            continue
        others = distinct.setdefault(type_, [])
        same = next((other for other in others if torch.equal(value, graph.values[other.partition(":")[2]])), None)
        if same is None:
            others.append(name)
        else:
            renamed[name] = same
    return replace(graph, nodes=tuple(substitute(node, renamed) for node in graph.nodes))


def _value(graph: FlatGraph, name: str) -> Tensor | None:
    kind, _, fqn = name.partition(":")
    return graph.values.get(fqn) if kind == "buffer" else None
