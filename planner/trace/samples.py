"""Every sample counts alone until the loss adds them up: what mixes them would differ between micro-batches and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.ir.errors import ModelError
from planner.ir.graph import Node
from planner.ir.types import Argument, BatchMultiple, Ref, TensorType
from planner.trace.canonical import prune
from planner.trace.flat import CONSTANT, FlatGraph, place
from planner.trace.meetings import refuse_meetings

NUMBERS = frozenset({"other", "value", "exponent", "alpha"})
"""Arguments that enter the values themselves, not shapes or indices."""

POSITIONS = frozenset({"arange", "linspace"})
COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
INDICES = frozenset({"index", "indices"})
"""Arguments that say where a value lies, and none themselves."""
OFFSETS = frozenset({"offs", "offsets"})
"""Those that say where groups of other indices or rows begin or end."""


def check_samples(graph: FlatGraph) -> FlatGraph:
    """The graph, if its values depend neither on the batch size nor on a mean, norm or other statistic over the batch.

    Raises ModelError naming the line. Integers (counts of tokens, say) may be pooled: they route, but do not blend.
    """
    graph = prune(graph)
    _check_positions(graph)
    pooled: set[str] = set()
    for node in graph.nodes:
        if any(key in NUMBERS and isinstance(value, BatchMultiple) for key, value in node.arguments):
            raise ModelError(place(node, graph.where), f"{node.base} computes with the batch size",
                             "a plan divides the batch; return (sum, weight) from loss() to average")
        whole = any(_batched(type_) for type_ in node.types)
        mixed = [name for name in node.operands if name in pooled]
        if mixed and whole and node.type.floating:
            raise ModelError(place(node, graph.where), f"{node.base} blends samples: it reads a statistic over the batch",
                             "statistics over a batch differ between micro-batches and plans; take them over each sample")
        reads_samples = mixed or any(_batched(graph.type_of(name)) for name in node.operands)
        if node.type.floating and not whole and reads_samples and node.base not in CONSTANT:
            pooled.add(node.name)
    refuse_meetings(graph)
    return graph


def _check_positions(graph: FlatGraph) -> None:
    """Raise ModelError where values depend on a sample's number in the batch: it is another one in a micro-batch. Such numbers
    may say where to read and write what the batch holds, and be compared with places that were worked out from it."""
    periods: dict[str, int] = {}  # of numbers that count through the batch, how many there are to a sample
    told = {name for name in graph.inputs if not name.startswith("buffer:")}  # what comes of the batch or parameters
    for node in graph.nodes:
        told |= {node.name} if node.base not in CONSTANT and not told.isdisjoint(node.operands) else set()
        if node.base in POSITIONS:
            periods.update((node.name, extent.factor) for extent in node.type.shape if isinstance(extent, BatchMultiple))
        read = [name for key, value in node.arguments for name in _counting(graph, node, key, value, periods)]
        routes = node.base in COMPARISONS and not told.isdisjoint(node.operands)
        if not read or routes or node.base in CONSTANT:
            continue
        if node.type.floating:
            raise ModelError(place(node, graph.where), f"{node.base} computes with the numbers of the samples in the batch",
                             "a plan divides the batch: a sample's value must not depend on its place in it")
        within = node.argument("other") if node.base == "remainder" else None
        same = isinstance(within, int) and within > 0 and all(periods[name] % within == 0 for name in read)
        if _batched(node.type) and not same:
            periods[node.name] = min(periods[name] for name in read)


def _counting(graph: FlatGraph, node: Node, key: str, value: Argument, periods: Mapping[str, int]) -> Iterator[str]:
    """The operands of an argument that count through the batch, where they are more than places in it."""
    places = key in OFFSETS or (key in INDICES and _batched(graph.type_of(node.operands[0])))
    if isinstance(value, Ref) and value.name in periods and not places:
        yield value.name
    if isinstance(value, tuple):
        for item in value:
            yield from _counting(graph, node, key, item, periods)


def _batched(type_: TensorType) -> bool:
    return any(isinstance(extent, BatchMultiple) for extent in type_.shape)
