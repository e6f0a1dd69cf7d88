"""Sections of a model in which nothing repeats: cut where one value crosses, in front of what has weights of its own, rather
between modules than within one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from planner.ir.body import Node
from planner.trace.flat import FlatGraph

PRODUCTS = 2
"""Of a section at least: over a tensor axis one can be split by columns and the next by rows. Between sections all is whole."""
MOST = 16
"""Sections of a model; those of the least work are joined with a neighbour. (Each is placed and priced by itself.)"""


def sections(graph: FlatGraph, nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """The nodes in their order, in one piece or several."""
    products = [at for at, node in enumerate(nodes) if any(_is_weight(graph, name) for name in node.operands)]
    crossing, cuts, since = _crossing(graph, nodes), list[int](), 0
    for place, (before, at) in enumerate(itertools.pairwise([-1, *products])):
        narrow = [cut for cut in range(before + 1, at + 1) if crossing[cut] < math.inf]
        if since >= PRODUCTS and len(products) - place >= PRODUCTS and narrow:
            cuts.append(min(narrow, key=lambda cut: (crossing[cut], len(_common(nodes[cut - 1 : cut + 1])), -cut)))
            since = 0
        since += 1
    pieces = [tuple(nodes[first:last]) for first, last in itertools.pairwise([0, *cuts, len(nodes)])]
    while len(pieces) > MOST:
        work = [sum(_work(graph, node) for node in piece) for piece in pieces]
        at = min(range(len(pieces) - 1), key=lambda at: work[at] + work[at + 1])
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


def module_of(nodes: Sequence[Node], others: Sequence[Node]) -> str:
    """The path of the module that has just these nodes; empty where there is none."""
    common = _common(nodes)
    shared = any((node.module or "").split(".")[: len(common)] == common for node in others)
    return "" if shared else ".".join(common)


def _common(nodes: Sequence[Node]) -> list[str]:
    """The path of the innermost module that all are in, part by part."""
    paths = [node.module.split(".") if node.module else [] for node in nodes]
    return [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))]


def _crossing(graph: FlatGraph, nodes: Sequence[Node]) -> list[float]:
    """[nodes]: bytes that cross a cut before each, where that is one value of the samples that gradients come back to; without
    end where it is not."""
    last = {name: at for at, node in enumerate(nodes) for name in node.operands}
    last |= dict.fromkeys(graph.outputs, len(nodes))
    alive, found = dict[str, Node](), list[float]()
    for at, node in enumerate(nodes):
        alive = {name: each for name, each in alive.items() if last.get(name, -1) >= at}
        values = list(alive.values())
        fits = len(values) == 1 and values[0].differentiable and len(values[0].types) == 1 and values[0].type.batched
        found.append(values[0].type.size_bytes() if fits else math.inf)
        alive[node.name] = node
    return found


def _is_weight(graph: FlatGraph, name: str) -> bool:
    return name.startswith("parameter:") and len(graph.type_of(name).shape) > 1


def _work(graph: FlatGraph, node: Node) -> int:
    """Of one sample, about: a product adds up over all dims of its weight but the first."""
    weights = [graph.type_of(name) for name in node.operands if _is_weight(graph, name)]
    depth = max((weight.elements() // max(weight.sizes(1)[0], 1) for weight in weights), default=1)
    return depth * sum(type_.elements() for type_ in node.types)
