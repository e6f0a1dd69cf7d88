"""Every sample counts alone until the loss adds them up: what mixes them would differ between micro-batches and plans."""

from __future__ import annotations

from planner.ir.errors import ModelError
from planner.ir.inlining import DRAWN
from planner.ir.types import BatchMultiple
from planner.ops.families import GROUPED_PRODUCT
from planner.trace.canonical import prune
from planner.trace.dtypes import CONSTANT
from planner.trace.flat import FlatGraph, place
from planner.trace.meetings import READS, WRITES, refuse_meetings

NUMBERS = frozenset({"other", "value", "exponent", "alpha", "low", "high"})
"""Arguments that enter the values themselves, not shapes or indices."""

ROUTED = frozenset({GROUPED_PRODUCT, *READS, *WRITES})
"""Operations that whole numbers tell where values lie, or go."""

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
"""Of numbers: a mask that a statistic draws blends samples as a product with it does."""


def check_samples(graph: FlatGraph) -> FlatGraph:
    """The graph, if its values depend neither on the batch size nor on a mean, norm or other statistic over the batch.

    Raises ModelError naming the line. Integers (counts of tokens, say) may be pooled: they route, but do not blend, unless they
    become numbers that are computed with.
    """
    graph = prune(graph)
    refuse_meetings(graph)
    pooled: set[str] = set()
    counts: set[str] = set()
    read = {name for name in graph.inputs if name.startswith("batch:")}
    for node in graph.nodes:
        if any(key in NUMBERS and isinstance(value, BatchMultiple) for key, value in node.arguments):
            raise ModelError(place(node, graph.where), f"{node.base} computes with the batch size",
                             "a plan divides the batch; return (sum, weight) from loss() to average")
        if node.base in CONSTANT:
            continue
        if node.base in DRAWN or not read.isdisjoint(node.operands):
            read.add(node.name)
        whole = any(type_.batched for type_ in node.types)
        several = any(graph.type_of(name).batched for name in node.operands)
        mixed = any(name in pooled for name in node.operands)
        counted = any(name in counts for name in (node.operands[:1] if node.base in ROUTED else node.operands))
        if (whole or several) and (mixed or counted) and (node.type.floating or (mixed and node.base in COMPARISONS)):
            raise ModelError(place(node, graph.where), f"{node.base} blends samples: it reads a statistic over the batch",
                             "statistics over a batch differ between micro-batches and plans; take them over each sample")
        if node.type.floating and not whole and (several or mixed or counted):
            pooled.add(node.name)
        counts_on = (several and not whole) or (counted and node.type.dtype != "bool")
        if counts_on and not node.type.floating and node.name in read:
            counts.add(node.name)
    return graph
