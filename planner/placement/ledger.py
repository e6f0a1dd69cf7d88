"""The collectives that a placed body performs for one micro-batch, for the plan's side of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from planner.ir.body import Body
from planner.ir.placement import BodyPlacement, CollectiveKind, Placement, Transfer, transfers
from planner.ir.types import TensorType
from planner.placement.edges import Edge, edges
from planner.placement.space import grows, legal_conversion


@dataclass(frozen=True, slots=True, order=True)
class CollectiveCount:
    """``count`` calls over the tensor axis, each with an input tensor of ``size_bytes`` on one rank."""

    kind: CollectiveKind
    size_bytes: int
    count: int


_Passes = tuple[tuple[Transfer, ...], tuple[Transfer, ...]]
"""Collectives of the forward and of the backward pass."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """The collectives of a placed body, whatever the batch. What a ``shared`` parameter sums once a step is not the block's."""

    body: Body
    placement: BodyPlacement
    degree: int

    @cached_property
    def _conversions(self) -> tuple[tuple[Edge, _Step, _Step], ...]:
        """Conversions that are not the identity, with their steps forward and backward."""
        reached, found = _gradient_reads(self.body, self.placement), []
        for edge in edges(self.body, self.placement):
            step = legal_conversion(edge.value, edge.source, edge.target, self.degree)
            if step is None or edge.source == edge.target:
                continue
            sharded = edge.source if edge.source.state == "shard" else edge.target
            backward = step.backward if (edge.name, edge.target) in reached else "identity"
            found.append((edge, _Step(step.forward, edge.value.type, sharded), _Step(backward, edge.value.type, sharded)))
        return tuple(found)

    @cached_property
    def _internal(self) -> tuple[tuple[str, bool, _Passes], ...]:
        """Collectives inside operations, and whether they grow with the batch: rules know none, they count one sample."""
        found = []
        for node, placed in zip(self.body.nodes, self.placement.nodes, strict=True):
            backward = placed.strategy.backward if node.name in self.body.asked else ()
            if placed.strategy.forward or backward:
                found.append((node.name, grows(self.body, node), (placed.strategy.forward, backward)))
        return tuple(found)

    def at(self, batch: int) -> MicrobatchTraffic:
        """For one micro-batch of ``batch`` samples."""
        if self.degree == 1:
            return MicrobatchTraffic(self.body, (), ())
        return MicrobatchTraffic(
            self.body,
            tuple(
                (edge, (there.transfers(self.degree, batch), back.transfers(self.degree, batch)))
                for edge, there, back in self._conversions
            ),
            tuple(
                (node, (_scaled(passes[0], batch if grows else 1), _scaled(passes[1], batch if grows else 1)))
                for node, grows, passes in self._internal
            ),
        )


@dataclass(frozen=True, eq=False)
class MicrobatchTraffic:
    """The same for one micro-batch: what conversions and operations perform, forward and backward."""

    body: Body
    conversions: tuple[tuple[Edge, _Passes], ...]
    internal: tuple[tuple[str, _Passes], ...]

    @cached_property
    def forward(self) -> tuple[CollectiveCount, ...]:
        """Of the forward pass, sorted."""
        return _count(transfer for _, passes in (*self.conversions, *self.internal) for transfer in passes[0])

    def backward(self, repeated: Collection[str] = ()) -> tuple[CollectiveCount, ...]:
        """Of the backward pass, sorted.

        ``repeated`` names the nodes that recomputation runs again in it: the body's nodes up to some point, or a region.
        Collectives inside them, and of the conversions that they are the first to read, are repeated there; a conversion at the
        edge of a region is kept, unless it is named itself (``value -> placement``).
        """
        everything = bool(self.body.nodes) and self.body.nodes[0].name in repeated
        performed = [transfer for _, passes in (*self.conversions, *self.internal) for transfer in passes[1]]
        for edge, passes in self.conversions if repeated else ():
            if f"{edge.name} -> {edge.target}" in repeated or (
                edge.reader in repeated and (everything or edge.name in repeated)
            ):
                performed += passes[0]
        for node, passes in self.internal if repeated else ():
            performed += passes[0] if node in repeated else ()
        return _count(performed)


@dataclass(frozen=True, slots=True)
class _Step:
    """One pass of a conversion of a value whose whole type is ``whole``."""

    kind: str
    whole: TensorType
    sharded: Placement

    def transfers(self, degree: int, batch: int) -> tuple[Transfer, ...]:
        return transfers(self.kind, self.whole, self.sharded, degree, batch)


def collectives(
    body: Body, placement: BodyPlacement, degree: int, batch: int, *, repeated: Collection[str] = ()
) -> tuple[tuple[CollectiveCount, ...], tuple[CollectiveCount, ...]]:
    """Forward and backward collectives of one block for one micro-batch of ``batch`` samples, those ``repeated`` included
    (:meth:`MicrobatchTraffic.backward`)."""
    traffic = Traffic(body, placement, degree).at(batch)
    return traffic.forward, traffic.backward(repeated)


def _gradient_reads(body: Body, placement: BodyPlacement) -> set[tuple[str, object]]:
    """The (value, target placement) pairs that a gradient comes back through: some reader passes one on."""
    outputs = zip(body.outputs, placement.outputs, strict=True)
    found: set[tuple[str, object]] = {(name, target) for name, target in outputs if name in body.differentiable}
    for node, placed in zip(body.nodes, placement.nodes, strict=True):
        if node.differentiable and node.name in body.asked:
            found |= set(zip(node.operands, placed.strategy.operands, strict=True))
    return {(name, target) for name, target in found if name in body.differentiable}


def _scaled(passed: tuple[Transfer, ...], scale: int) -> tuple[Transfer, ...]:
    return tuple(Transfer(transfer.kind, transfer.size_bytes * scale) for transfer in passed)


def _count(passed: Iterable[Transfer]) -> tuple[CollectiveCount, ...]:
    counted = Counter((transfer.kind, transfer.size_bytes) for transfer in passed)
    return tuple(sorted(CollectiveCount(kind, size, count) for (kind, size), count in counted.items()))
