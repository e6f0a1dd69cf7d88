"""The part of a block that selective recomputation repeats: attention between its projections.

Storing the scores, their softmax and what surrounds them costs memory quadratic in the sequence, or linear with a fused
kernel, while repeating them costs few FLOPs (Korthikanti et al. 2022, section 5). A region is convex (no path leaves it
and comes back), reads no parameter, and reaches from the outputs of the contractions with weights to the input of the
next one. Nothing is recognised by the names of modules or of values.
"""

from __future__ import annotations

import networkx as nx

from planner.ir.graph import Body, Node

_FUSED = frozenset({"scaled_dot_product_attention"})
_CONTRACTIONS = frozenset({"matmul", "mm", "bmm", "baddbmm", "einsum"})
_SOFTMAX = frozenset({"softmax", "_softmax"})


def recompute_regions(body: Body) -> tuple[tuple[str, ...], ...]:
    """The regions of a body (one per attention, unless they touch), each as node names in execution order."""
    free = {node.name for node in body.nodes if not _reads_parameter(body, node)}
    grown: set[str] = set()
    for seeds in _seeds(body, free):
        grown |= _grow(body, seeds, free)
    return _components(body, grown)


def recompute_region(body: Body) -> tuple[str, ...]:
    """Names of all nodes that selective recomputation repeats, in execution order; empty where there is no attention."""
    names = {name for region in recompute_regions(body) for name in region}
    return tuple(node.name for node in body.nodes if node.name in names)


def _reads_parameter(body: Body, node: Node) -> bool:
    parameters = {parameter.name for parameter in body.parameters}
    return any(operand in parameters for operand in node.operands)


def _reach(flow: nx.DiGraph[str], start: set[str], *, forward: bool) -> set[str]:
    """Nodes reached from ``start`` (itself included)."""
    walk = nx.descendants if forward else nx.ancestors
    return start.union(*(walk(flow, name) for name in start if name in flow))


def _seeds(body: Body, free: set[str]) -> list[set[str]]:
    """Cores of attention: fused nodes, and the nodes between two contractions that enclose a softmax."""
    seeds = []
    flow = body.dataflow.subgraph(free)
    for node in body.nodes:
        if node.base in _FUSED:
            seeds.append({node.name})
        if node.base not in _SOFTMAX or node.name not in free:
            continue
        before = _reach(flow, {node.name}, forward=False)
        after = _reach(flow, {node.name}, forward=True)
        scores = {name for name in before if body.by_name[name].base in _CONTRACTIONS}
        mixes = {name for name in after if body.by_name[name].base in _CONTRACTIONS}
        if scores and mixes:
            above = _reach(flow, scores, forward=True)
            below = _reach(flow, mixes, forward=False)
            seeds.append((above & before) | (after & below))
    return seeds


def _grow(body: Body, seeds: set[str], free: set[str]) -> set[str]:
    """The largest convex set of parameter-free nodes around the seeds, grown a node at a time."""
    region = set(seeds)
    changed = True
    while changed:
        changed = False
        for node in reversed(body.nodes):
            if node.name in free and node.name not in region and _joins_before(body, node, region):
                region.add(node.name)
                changed = True
        for node in body.nodes:
            if node.name in free and node.name not in region and _joins_after(body, node, region):
                region.add(node.name)
                changed = True
    return region


def _joins_before(body: Body, node: Node, region: set[str]) -> bool:
    """Whether a producer of the region can join it: no path from it returns to the region from outside."""
    consumers = set(body.dataflow.successors(node.name))
    outside = consumers - region
    return bool(consumers & region) and not _reach(body.dataflow, outside, forward=True) & region


def _joins_after(body: Body, node: Node, region: set[str]) -> bool:
    """Whether a consumer of the region can join it: it leads on to a contraction, and all else it reads is older."""
    producers = set(body.dataflow.predecessors(node.name))
    outside = producers - region
    if not producers & region or _reach(body.dataflow, outside, forward=False) & region:
        return False
    return bool(body.consumers.get(node.name)) and node.name not in body.outputs


def _components(body: Body, names: set[str]) -> tuple[tuple[str, ...], ...]:
    """Connected parts in execution order, each in execution order."""
    position = {node.name: at for at, node in enumerate(body.nodes)}
    parts = [sorted(part, key=position.__getitem__) for part in nx.weakly_connected_components(body.dataflow.subgraph(names))]
    return tuple(tuple(part) for part in sorted(parts, key=lambda part: position[part[0]]))
