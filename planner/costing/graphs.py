"""cost_graph: every block kind of a graph, under every option, recomputation level and ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.costing.activations import context_bytes
from planner.costing.blocks import price_block, time_block, whole_seconds
from planner.costing.measured import BlockWork, PlacedBody, WholeBody
from planner.costing.operations import Operation
from planner.costing.pricing import Pricing
from planner.costing.state_prices import ZERO_STAGES, Placements, state_costs
from planner.costing.waiting import waiting_gradients
from planner.ir.costed import RECOMPUTE_LEVELS, BlockCost, BlockSeconds, CostedGraph, Recompute
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement, local_type
from planner.ir.plan import Mesh, Precision
from planner.rules import has_rule

BlockCosts = dict[str, dict[Recompute, BlockCost]]
"""By body and recomputation level."""
LeastCosts = dict[str, dict[Recompute, tuple[BlockSeconds, int]]]
"""By body and recomputation level: seconds, and bytes that are kept."""
Priced = TypeVar("Priced")


SCALAR_BYTES = 44
"""Single numbers that a micro-batch may have alive beside its inputs: a target (float32), the loss, its clone, its product with
the scale and that one's gradient (up to float64), the scale itself (runtime/schedule.py, runtime/loop.py)."""


@dataclass(frozen=True)
class GraphWork:
    """A graph under every option, counted and not priced, for one tensor degree and micro-batch. ``blocks[option][body]``;
    ``context``: the operations of the context; other fields as in :class:`~planner.ir.costed.CostedGraph`."""

    graph: ModelGraph
    degree: int
    microbatch: int
    placements: tuple[Placements, ...]
    blocks: tuple[Mapping[str, BlockWork], ...]
    crossing_bytes: tuple[Mapping[int, int], ...]
    received_bytes: tuple[Mapping[int, int], ...]
    context: tuple[Operation, ...]
    context_bytes: int
    batch_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PlacedGraph:
    """A graph under every option (a placement for each body, by its name), for one tensor degree, to be measured at any
    micro-batch. What does not depend on it is found once; so is what options have in common."""

    graph: ModelGraph
    degree: int
    placements: tuple[Placements, ...]

    @cached_property
    def options(self) -> tuple[Mapping[str, PlacedBody], ...]:
        """By option and body; bodies that are placed alike are the same."""
        known: dict[BodyPlacement, PlacedBody] = {}
        for body in self.graph.bodies:
            whole = WholeBody(body)
            for placement in dict.fromkeys(option[body.name] for option in self.placements):
                known[placement] = PlacedBody(whole, placement)
        return tuple({body.name: known[option[body.name]] for body in self.graph.bodies} for option in self.placements)

    @cached_property
    def context(self) -> WholeBody:
        """Every rank computes all of it."""
        return WholeBody(self.graph.context)

    def blocks(
        self, microbatch: int, levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS, context: int = 1,
        engine: Engine = DEFAULT_ENGINE,
    ) -> tuple[Mapping[str, BlockWork], ...]:
        """Every body under every option."""
        distinct = dict.fromkeys(placed for option in self.options for placed in option.values())
        work = {placed: placed.measure(microbatch, levels, context, engine) for placed in distinct}
        return tuple({name: work[placed] for name, placed in option.items()} for option in self.options)

    def measure(
        self, microbatch: int, levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS, context: int = 1,
        engine: Engine = DEFAULT_ENGINE,
    ) -> GraphWork:
        """Count everything, under the recomputation levels that are asked for. ``context``: degree of the axis that the
        sequence is divided over; the graph is that of one rank's tokens; ``engine``: by whose bookkeeping bytes are kept
        (nothing else of it counts)."""
        graph = self.graph
        blocks = self.blocks(microbatch, levels, context, engine)
        return GraphWork(
            graph, self.degree, microbatch, self.placements, blocks,
            crossing_bytes=tuple(_crossing_bytes(graph, option, microbatch) for option in self.placements),
            received_bytes=tuple(
                _received_bytes(graph, option, blocks_of, microbatch) if engine.keeps == "operations" else {}
                for option, blocks_of in zip(self.placements, blocks, strict=True)
            ),
            context=self.context.measure(microbatch),
            context_bytes=context_bytes(graph, microbatch),
            batch_bytes=SCALAR_BYTES + sum(item.type.size_bytes(microbatch) for item in graph.batch_inputs),
            warnings=replicated_operations(graph) if self.degree > 1 else (),
        )


def measure_graph(
    graph: ModelGraph, degree: int, microbatch: int, options: tuple[Placements, ...],
    levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS, context: int = 1, engine: Engine = DEFAULT_ENGINE,
) -> GraphWork:
    """Count every option at one micro-batch (:meth:`PlacedGraph.measure`)."""
    return PlacedGraph(graph, degree, options).measure(microbatch, levels, context, engine)


def price_graph(
    counted: GraphWork, cluster: Cluster, *, mesh: Mesh, precision: Precision, zero_group: int, accumulation: int = 2,
    engine: Engine = DEFAULT_ENGINE, stages: Sequence[int] = ZERO_STAGES,
) -> CostedGraph:
    """Price what was counted. ``accumulation``: micro-batches of a step; ``engine``: what runs it; ``stages``: the ZeRO
    stages that are asked for."""
    pricing = Pricing(
        cluster, mesh.tensor, counted.microbatch, (mesh.tensor_stride,), engine=engine, context=mesh.context, expert=mesh.expert
    )
    blocks = _each(counted.blocks, partial(price_block, pricing=pricing, group=min(zero_group, mesh.data)))
    if counted.graph.tied and mesh.pipeline == 1 and engine.keeps == "operations":
        blocks = _beside_waiting(counted, blocks)
    return CostedGraph(
        counted.graph, mesh.tensor, counted.microbatch, counted.placements, blocks=blocks,
        states=state_costs(
            counted.graph, counted.placements, cluster, mesh, precision, zero_group, accumulation, stages, engine
        ),
        crossing_bytes=counted.crossing_bytes,
        context_s=whole_seconds(counted.context, pricing),
        context_bytes=counted.context_bytes,
        batch_bytes=counted.batch_bytes,
        warnings=counted.warnings,
        received_bytes=counted.received_bytes,
    )


def _beside_waiting(counted: GraphWork, blocks: Sequence[BlockCosts]) -> tuple[BlockCosts, ...]:
    """Backward passes beside the gradients that wait for those of blocks with the same parameters."""
    def beside(cost: BlockCost, pass_bytes: int, waiting: tuple[int, int]) -> BlockCost:
        most = max(pass_bytes + waiting[0], cost.backward_peak_bytes + waiting[1])
        return replace(cost, backward_peak_bytes=most)

    found = []
    for placements, costs, works in zip(counted.placements, blocks, counted.blocks, strict=True):
        waiting = waiting_gradients(counted.graph, placements, counted.degree)
        found.append({
            name: {
                level: beside(cost, works[name].levels[level].memory.backward_peak_bytes, waiting[name])
                for level, cost in of_body.items()
            }
            for name, of_body in costs.items()
        })
    return tuple(found)


def cost_graph(
    graph: ModelGraph, cluster: Cluster, *, mesh: Mesh, microbatch: int, precision: Precision, zero_group: int,
    options: tuple[Placements, ...], accumulation: int = 2, engine: Engine = DEFAULT_ENGINE,
) -> CostedGraph:
    """Count and price every option for one candidate."""
    return price_graph(
        measure_graph(graph, mesh.tensor, microbatch, options), cluster, mesh=mesh, precision=precision,
        zero_group=zero_group, accumulation=accumulation, engine=engine,
    )


def replicated_operations(graph: ModelGraph) -> tuple[str, ...]:
    """What the plan says aloud: operations without a sharding rule, which every tensor rank runs whole."""
    unknown = {(body.name, node.op) for body in graph.bodies for node in body.nodes if not has_rule(node)}
    return tuple(
        f"{body}: {op} has no sharding rule: every tensor rank runs it whole" for body, op in sorted(unknown)
    )


def least_costs(placed: PlacedGraph, pricing: Pricing) -> tuple[LeastCosts, ...]:
    """Every body under every recomputation level, for every option, as far as a lower bound goes into it."""
    def least(block: BlockWork) -> dict[Recompute, tuple[BlockSeconds, int]]:
        seconds = time_block(block, pricing)
        return {level: (seconds[level], work.memory.saved_bytes) for level, work in block.levels.items()}

    return _each(placed.blocks(pricing.microbatch), least)


def _each(
    options: Sequence[Mapping[str, BlockWork]], price: Callable[[BlockWork], Priced]
) -> tuple[dict[str, Priced], ...]:
    """What options have in common is priced once."""
    distinct = {id(block): block for blocks in options for block in blocks.values()}
    prices = {key: price(block) for key, block in distinct.items()}
    return tuple({name: prices[id(block)] for name, block in blocks.items()} for blocks in options)


def _crossing_bytes(graph: ModelGraph, option: Mapping[str, BodyPlacement], microbatch: int) -> dict[int, int]:
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        placement = option[block.body]
        for name, placed in zip(block.writes, placement.outputs, strict=True):
            local = local_type(graph.activation_types[name], placed, placement.degree)
            sizes[name] = local.size_bytes(microbatch)
    return {cut: sum(sizes[name] for name in graph.crossing(cut)) for cut in range(1, len(graph.blocks))}


def _received_bytes(
    graph: ModelGraph, option: Placements, blocks: Mapping[str, BlockWork], microbatch: int
) -> dict[int, int]:
    """Of what crosses a cut, what the block after it keeps at every level. (Engines that receive into what blocks keep have no
    buffers beside it.)"""
    kept: dict[str, dict[str, int]] = {}
    for body in graph.bodies:
        placement, levels = option[body.name], blocks[body.name].levels.values()
        kept[body.name] = {
            value.name: local_type(value.type, placed, placement.degree).size_bytes(microbatch)
            for value, placed in zip(body.inputs, placement.inputs, strict=True)
            if value.differentiable and all(value.name in level.memory.kept.roots for level in levels)
        }
    found = {}
    for cut in range(1, len(graph.blocks)):
        block = graph.blocks[cut]
        crossing = set(graph.crossing(cut))
        values = zip(graph.body_of[block.body].inputs, block.reads, strict=True)
        found[cut] = sum(kept[block.body].get(value.name, 0) for value, name in values if name in crossing)
    return found
