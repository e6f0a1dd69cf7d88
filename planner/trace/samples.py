"""Every sample counts alone until the loss adds them up: what mixes them would differ between micro-batches and plans."""

from __future__ import annotations

from planner.ir.errors import ModelError
from planner.ir.types import BatchMultiple, TensorType
from planner.trace.canonical import prune
from planner.trace.dtypes import CONSTANT
from planner.trace.flat import FlatGraph, place
from planner.trace.meetings import refuse_meetings

NUMBERS = frozenset({"other", "value", "exponent", "alpha"})
"""Arguments that enter the values themselves, not shapes or indices."""

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
"""Of numbers: a mask that a statistic draws blends samples as a product with it does."""


def check_samples(graph: FlatGraph) -> FlatGraph:
    """The graph, if its values depend neither on the batch size nor on a mean, norm or other statistic over the batch.

    Raises ModelError naming the line. Integers (counts of tokens, say) may be pooled: they route, but do not blend.
    """
    graph = prune(graph)
    refuse_meetings(graph)
    pooled: set[str] = set()
    for node in graph.nodes:
        if any(key in NUMBERS and isinstance(value, BatchMultiple) for key, value in node.arguments):
            raise ModelError(place(node, graph.where), f"{node.base} computes with the batch size",
                             "a plan divides the batch; return (sum, weight) from loss() to average")
        whole = any(_batched(type_) for type_ in node.types)
        mixed = [name for name in node.operands if name in pooled]
        if mixed and whole and (node.type.floating or node.base in COMPARISONS):
            raise ModelError(place(node, graph.where), f"{node.base} blends samples: it reads a statistic over the batch",
                             "statistics over a batch differ between micro-batches and plans; take them over each sample")
        reads_samples = mixed or any(_batched(graph.type_of(name)) for name in node.operands)
        if node.type.floating and not whole and reads_samples and node.base not in CONSTANT:
            pooled.add(node.name)
    return graph


def _batched(type_: TensorType) -> bool:
    return any(isinstance(extent, BatchMultiple) for extent in type_.shape)
