"""What a placed graph does on one rank, counted once and priced as often as rates change.

Nothing here depends on a rate, a link or an engine: operations with their FLOPs and bytes, collectives with their sizes,
bytes that autograd keeps. :mod:`planner.costing.blocks` and :mod:`planner.costing.graphs` price it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hardware_profiles import DEFAULT_ENGINE, Engine
from planner.costing.activations import kept_storages, repeated_steps
from planner.costing.exchanges import Exchange, exchanges, over_context
from planner.costing.expressions import Text
from planner.costing.forward import Emitted
from planner.costing.kept import Keeping
from planner.costing.levels import LevelMemory
from planner.costing.local import LocalBody, Wiring, wire
from planner.costing.operations import LocalCall, Operation, local_call
from planner.costing.passes import BlockPasses
from planner.costing.repeated import computed_nodes, repeated_nodes
from planner.ir.body import Body, Node
from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.placement import REPLICATE, BodyPlacement, OpStrategy, local_type
from planner.ir.types import DTYPE_BYTES, TensorType
from planner.placement.ledger import CollectiveCount, MicrobatchTraffic, Traffic


@dataclass(frozen=True)
class LevelWork:
    """What a recomputation level changes. ``repeated``: nodes that run again; ``backward``: collectives of the backward
    pass, the repeated ones included."""

    repeated: frozenset[str]
    backward: tuple[CollectiveCount, ...]
    memory: LevelMemory


@dataclass(frozen=True)
class BlockWork:
    """One block for one micro-batch on rank 0 (which holds the most). ``forward``, ``backward``: collectives over the tensor
    axis without recomputation; ``exchanges``: over the context and the expert axis; ``master_bytes``: of the trained
    parameters' masters; ``hooked``: whether ZeRO's hooks run in its forward and in its backward pass, whatever is trained;
    ``flops``: model FLOPs of all tensor and context ranks."""

    operations: tuple[Operation, ...]
    forward: tuple[CollectiveCount, ...]
    backward: tuple[CollectiveCount, ...]
    exchanges: tuple[Exchange, ...]
    levels: Mapping[Recompute, LevelWork]
    parameter_elements: int
    master_bytes: int
    hooked: tuple[bool, bool]
    buffer_bytes: int
    flops: float


@dataclass(frozen=True, eq=False)
class WholeBody:
    """A body as a rank runs it that computes all of it."""

    body: Body
    _flops: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    _shares: dict[tuple[str, OpStrategy, int], LocalCall] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def calls(self) -> tuple[LocalCall, ...]:
        return tuple(self.share(node, _whole(node), 1) for node in self.body.nodes)

    def share(self, node: Node, strategy: OpStrategy, degree: int) -> LocalCall:
        """One rank's share of a node: one for all placements that run it alike."""
        key = node.name, strategy, degree
        if key not in self._shares:
            self._shares[key] = local_call(self.body, node, strategy, degree)
        return self._shares[key]

    def measure(self, microbatch: int) -> tuple[Operation, ...]:
        """Count its operations."""
        return tuple(call.measure(microbatch) for call in self.calls)

    def flops(self, microbatch: int, context: int = 1) -> float:
        """FLOPs of forward and backward of the whole block for ``microbatch`` samples: products and attention, without the
        causal half and without recomputation (Chowdhery et al. 2022, appendix B). Of ``context`` ranks, each has its tokens,
        and attends to those of all."""
        key = microbatch, context
        if key not in self._flops:
            total = 0.0
            for item in self.measure(microbatch):
                scale = context**2 if item.forward.attention is not None else context
                total += scale * sum(part.flops for part in (item.forward, item.to_input, item.to_weight))
            self._flops[key] = total
        return self._flops[key]


@dataclass(frozen=True, eq=False)
class PlacedBody:
    """One body under one placement: what does not depend on the micro-batch is found once."""

    whole: WholeBody
    placement: BodyPlacement

    @property
    def body(self) -> Body:
        return self.whole.body

    @cached_property
    def calls(self) -> tuple[LocalCall, ...]:
        """What rank 0 (which holds the most) calls."""
        strategies = {node.node: node.strategy for node in self.placement.nodes}
        degree = self.placement.degree
        return tuple(self.whole.share(node, strategies[node.name], degree) for node in self.body.nodes)

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(self.body, self.placement, self.placement.degree)

    @cached_property
    def wiring(self) -> Wiring:
        return wire(self.body, self.placement)

    @cached_property
    def text(self) -> Text:
        return Text.of(self.wiring)

    @cached_property
    def needed(self) -> Mapping[Recompute, tuple[frozenset[str], frozenset[str]]]:
        """By recomputation level, nodes whose kernels run again and nodes that are reached again, where it stops with what the
        backward pass needs."""
        local = self.wiring.local(1)
        return {level: (computed_nodes(local, level), repeated_nodes(local, level)) for level in RECOMPUTE_LEVELS}

    def measure(
        self, microbatch: int, levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS, context: int = 1,
        engine: Engine = DEFAULT_ENGINE,
    ) -> BlockWork:
        """Count one block for one micro-batch. ``context``: ranks that hold a part of the sequence each, of which the graph is
        one's; ``engine``: by whose bookkeeping bytes are kept (nothing else of it counts)."""
        local = self.wiring.local(microbatch)
        traffic = self.traffic.at(microbatch)
        exchanged, trained = exchanges(self.body, self.placement, microbatch), trained_types(self.body, self.placement)
        return BlockWork(
            operations=tuple(over_context(call.measure(microbatch), exchanged, context) for call in self.calls),
            forward=traffic.forward, backward=traffic.backward(),
            exchanges=exchanged,
            levels=self._levels(local, traffic, levels, engine),
            parameter_elements=sum(type_.elements() for type_ in trained),
            master_bytes=sum(type_.elements() * max(4, DTYPE_BYTES[type_.dtype]) for type_ in trained),
            hooked=(bool(self.body.parameters), bool(self.body.parameters) and _has_backward(self.body)),
            buffer_bytes=sum(value.type.size_bytes(microbatch) for value in self.body.buffers),
            flops=self.whole.flops(microbatch, context),
        )

    def _levels(
        self, local: LocalBody, traffic: MicrobatchTraffic, levels: tuple[Recompute, ...], engine: Engine
    ) -> Mapping[Recompute, LevelWork]:
        emitted, regions = Emitted(local, self.text), bool(self.body.regions)
        plain = BlockPasses(emitted, "none")
        found: dict[Recompute, LevelWork] = {}
        for level in levels:
            if level == "selective" and engine.selective == "alternate":
                repeated, moved = Keeping(local, engine).repeated()
            elif engine.repeats == "all":
                repeated = frozenset(step.node.name for step in repeated_steps(local, level) if step.node is not None)
                moved = repeated
            else:
                repeated, moved = self.needed[level]
            passes = BlockPasses(emitted, level) if level == "full" or (level == "selective" and regions) else plain
            memory = LevelMemory(kept_storages(local, level), passes, level, engine)
            found[level] = LevelWork(repeated, traffic.backward(moved), memory)
        return found


def _has_backward(body: Body) -> bool:
    return not body.differentiable.isdisjoint(body.outputs)


def _whole(node: Node) -> OpStrategy:
    return OpStrategy("replicate", (REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.types))


def measure_block(
    body: Body, placement: BodyPlacement, microbatch: int, levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS,
    context: int = 1, engine: Engine = DEFAULT_ENGINE,
) -> BlockWork:
    """Count one block under one placement for one micro-batch (:meth:`PlacedBody.measure`)."""
    return PlacedBody(WholeBody(body), placement).measure(microbatch, levels, context, engine)


def trained_types(body: Body, placement: BodyPlacement) -> tuple[TensorType, ...]:
    """Of the trained parameters, on rank 0 of the tensor axis."""
    return tuple(
        local_type(value.type, placed, placement.degree)
        for value, placed in zip(body.parameters, placement.parameters, strict=True) if value.differentiable
    )


def parameter_elements(body: Body, placement: BodyPlacement) -> int:
    """Trained elements that rank 0 of the tensor axis holds."""
    return sum(type_.elements() for type_ in trained_types(body, placement))
