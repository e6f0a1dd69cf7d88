"""The part of a block that selective recomputation repeats: attention between its projections.

Storing the scores, their softmax and what surrounds them costs memory quadratic in the sequence, or linear with a fused
kernel, while repeating them costs few FLOPs (Korthikanti et al. 2022, section 5). A region is convex (no path leaves it
and comes back), reads no parameter, and reaches from the outputs of the contractions with weights to the input of the
next one. Nothing is recognised by the names of modules or of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from planner.ir.body import Body, Node

_FUSED = frozenset({"scaled_dot_product_attention"})
_CONTRACTIONS = frozenset({"matmul", "mm", "bmm", "baddbmm", "einsum"})
_SOFTMAX = frozenset({"softmax", "_softmax"})
_LAYS_OUT = frozenset({"alias", "contiguous", "permute", "reshape", "to", "transpose", "unsqueeze"})
"""What leaves a parameter the same numbers."""


def recompute_regions(body: Body) -> tuple[tuple[str, ...], ...]:
    """The regions of a body, each as node names in execution order: one per attention. Those that touch are one, unless a path
    would leave it and come back (two attentions may share a mask, and one be made of the other)."""
    free = _without_parameters(body)
    regions: list[set[str]] = []
    for seeds in _seeds(body, free):
        taken = set[str]().union(*regions)
        if not seeds - taken:
            continue
        region = _with_parts(body, _grow(body, seeds - taken, free - taken))
        around = region | {name for edge in body.dataflow.edges if region & set(edge) for name in edge}
        apart = [other for other in regions if not other & around]
        joined = region.union(*(other for other in regions if other & around))
        for found in ([*apart, joined], [*regions, region]):
            if _have_an_order(body, found):
                regions = found
                break
    position = {node.name: at for at, node in enumerate(body.nodes)}
    parts = [tuple(sorted(region, key=position.__getitem__)) for region in regions]
    return tuple(sorted(parts, key=lambda part: position[part[0]]))


def _with_parts(body: Body, region: set[str]) -> set[str]:
    """The region with all results of its operations, and of no other's."""
    parts = {node.name for node in body.nodes if node.op == "getitem"}
    return (region - parts) | {name for name in parts if body.by_name[name].operands[0] in region}


def _have_an_order(body: Body, regions: Sequence[set[str]]) -> bool:
    """Whether each region can run in one piece."""
    group = {name: at for at, region in enumerate(regions) for name in region}
    flow = nx.DiGraph((group.get(a, a), group.get(b, b)) for a, b in body.dataflow.edges)
    flow.remove_edges_from(list(nx.selfloop_edges(flow)))
    return nx.is_directed_acyclic_graph(flow)


def recompute_region(body: Body) -> tuple[str, ...]:
    """Names of all nodes that selective recomputation repeats, in execution order; empty where there is no attention."""
    names = {name for region in body.regions for name in region}
    return tuple(node.name for node in body.nodes if node.name in names)


def _without_parameters(body: Body) -> set[str]:
    """Nodes that read no parameter, however it lies."""
    parameters, free = {parameter.name for parameter in body.parameters}, set[str]()
    for node in body.nodes:
        if parameters.isdisjoint(node.operands):
            free.add(node.name)
        elif node.base in _LAYS_OUT:
            parameters.add(node.name)
    return free


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
