"""The collectives that a placed body performs for one micro-batch, for the plan's side of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from planner.ir.graph import Body, Node
from planner.ir.placement import BodyPlacement, CollectiveKind, Transfer, transfers
from planner.ir.types import BatchMultiple
from planner.placement.edges import Edge, edges
from planner.placement.space import legal_conversion


@dataclass(frozen=True, slots=True, order=True)
class CollectiveCount:
    """``count`` calls over the tensor axis, each with an input tensor of ``size_bytes`` on one rank."""

    kind: CollectiveKind
    size_bytes: int
    count: int


def collectives(
    body: Body, placement: BodyPlacement, degree: int, batch: int, *, repeated: Collection[str] = ()
) -> tuple[tuple[CollectiveCount, ...], tuple[CollectiveCount, ...]]:
    """Forward and backward collectives of one block for one micro-batch of ``batch`` samples, sorted.

    ``repeated`` names the nodes that recomputation runs again in the backward pass: the body's nodes up to some point,
    or a region. Collectives inside them, and of the conversions that they are the first to read, are repeated there; a
    conversion at the edge of a region is kept, unless it is named itself (``value -> placement``). What a ``shared``
    parameter sums once a step is not the block's.
    """
    if degree == 1:
        return (), ()
    steps = tuple(_conversions(body, placement, degree, batch))
    inner = tuple(_internal(body, placement, batch))
    everything = bool(body.nodes) and body.nodes[0].name in repeated
    again = [
        *(
            passes for edge, passes in steps
            if f"{edge.name} -> {edge.target}" in repeated
            or (edge.reader in repeated and (everything or edge.name in repeated))
        ),
        *(passes for node, passes in inner if node in repeated),
    ]
    performed = [passes for _, passes in (*steps, *inner)]
    forward = [transfer for passes in performed for transfer in passes[0]]
    backward = [transfer for passes in performed for transfer in passes[1]]
    return _count(forward), _count((*backward, *(transfer for passes in again for transfer in passes[0])))


_Passes = tuple[tuple[Transfer, ...], tuple[Transfer, ...]]


def _conversions(body: Body, placement: BodyPlacement, degree: int, batch: int) -> Iterator[tuple[Edge, _Passes]]:
    reached = _gradient_reads(body, placement)
    for edge in edges(body, placement):
        step = legal_conversion(edge.value, edge.source, edge.target, degree)
        if step is None or edge.source == edge.target:
            continue
        sharded = edge.source if edge.source.state == "shard" else edge.target
        backward = step.backward if (edge.name, edge.target) in reached else "identity"
        yield edge, (
            transfers(step.forward, edge.value.type, sharded, degree, batch),
            transfers(backward, edge.value.type, sharded, degree, batch),
        )


def _gradient_reads(body: Body, placement: BodyPlacement) -> set[tuple[str, object]]:
    """The (value, target placement) pairs that a gradient comes back through: some reader passes one on."""
    outputs = zip(body.outputs, placement.outputs, strict=True)
    found: set[tuple[str, object]] = {(name, target) for name, target in outputs if name in body.differentiable}
    for node, placed in zip(body.nodes, placement.nodes, strict=True):
        if node.differentiable and node.name in body.asked:
            found |= set(zip(node.operands, placed.strategy.operands, strict=True))
    return {(name, target) for name, target in found if name in body.differentiable}


def _internal(body: Body, placement: BodyPlacement, batch: int) -> Iterator[tuple[str, _Passes]]:
    """Collectives inside operations. Rules know no batch: they count one sample of what grows with it."""
    for node, placed in zip(body.nodes, placement.nodes, strict=True):
        scale = batch if _grows(body, node) else 1
        strategy = placed.strategy
        backward = strategy.backward if node.name in body.asked else ()
        if strategy.forward or backward:
            yield node.name, (_scaled(strategy.forward, scale), _scaled(backward, scale))


def _grows(body: Body, node: Node) -> bool:
    types = (*(body.types[name] for name in node.operands), *node.types)
    return any(isinstance(extent, BatchMultiple) for type_ in types for extent in type_.shape)


def _scaled(passed: tuple[Transfer, ...], scale: int) -> tuple[Transfer, ...]:
    return tuple(Transfer(transfer.kind, transfer.size_bytes * scale) for transfer in passed)


def _count(passed: Iterable[Transfer]) -> tuple[CollectiveCount, ...]:
    counted = Counter((transfer.kind, transfer.size_bytes) for transfer in passed)
    return tuple(sorted(CollectiveCount(kind, size, count) for (kind, size), count in counted.items()))
