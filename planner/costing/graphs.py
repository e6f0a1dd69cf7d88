"""cost_graph: every block kind of a graph, under every option, recomputation level and ZeRO stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial, reduce
from math import prod
from typing import TypeVar

from cost_models.memory import shard_elements
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.costing.activations import context_bytes
from planner.costing.blocks import price_block, time_block, whole_seconds
from planner.costing.engine_states import flat_state, gathered_one_by_one
from planner.costing.exchanges import expert_parameters
from planner.costing.measured import BlockWork, PlacedBody, WholeBody
from planner.costing.operations import Operation
from planner.costing.pricing import Pricing
from planner.costing.states import Elements, State
from planner.costing.waiting import waiting_gradients
from planner.ir.body import Body, BodyValue
from planner.ir.costed import RECOMPUTE_LEVELS, BlockCost, BlockSeconds, CostedGraph, Recompute, StateCost
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement, Placement, local_type
from planner.ir.plan import Mesh, Precision
from planner.rules import has_rule

ZERO_STAGES = (0, 1, 2, 3)
Placements = Mapping[str, BodyPlacement]
"""By body."""
BlockCosts = dict[str, dict[Recompute, BlockCost]]
"""By body and recomputation level."""
LeastCosts = dict[str, dict[Recompute, tuple[BlockSeconds, int]]]
"""By body and recomputation level: seconds, and bytes that are kept."""
StateCosts = Mapping[str, Mapping[int, StateCost]]
"""By body and ZeRO stage."""
Priced = TypeVar("Priced")
_Held = Sequence[tuple[BodyValue, Placement]]


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


def state_costs(
    graph: ModelGraph, options: Sequence[Placements], cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int,
    accumulation: int = 2, stages: Sequence[int] = ZERO_STAGES, engine: Engine = DEFAULT_ENGINE,
) -> tuple[StateCosts, ...]:
    """The state of every body under every ZeRO stage that is asked for, for each option."""
    return states_by_group(graph, options, cluster, mesh, precision, (zero_group,), accumulation, stages, engine)[0]


def states_by_group(
    graph: ModelGraph, options: Sequence[Placements], cluster: Cluster, mesh: Mesh, precision: Precision,
    zero_groups: Sequence[int], accumulation: int = 2, stages: Sequence[int] = ZERO_STAGES, engine: Engine = DEFAULT_ENGINE,
) -> list[tuple[StateCosts, ...]]:
    """For each ZeRO group, the state of every body under every ZeRO stage that is asked for, for each option. Without a
    pipeline a parameter that several blocks share is held once, by the first of them."""
    tied = _tied(graph) if mesh.pipeline == 1 else frozenset()
    reached = graph.gradients.reached_bodies(mesh.pipeline)
    known: list[dict[tuple[str, tuple[Placement, ...]], dict[int, StateCost]]] = [{} for _ in zero_groups]
    for body in graph.bodies:
        bound = (names for block in graph.blocks if block.body == body.name for names in block.parameters) if tied else ()
        shares = any(fqn in tied for _, fqn in bound)
        held = _held(graph, body) if shares else [value.name for value in body.parameters]
        # Options differ in some of the bodies, and not all of these in their parameters.
        for placed in dict.fromkeys(option[body.name].parameters for option in options):
            mine = [pair for pair in zip(body.parameters, placed, strict=True) if pair[0].name in held]
            parts = _replicas(mine, expert_parameters(body) if mesh.expert > 1 else frozenset(), mesh)
            flat = engine.keeps == "fused"
            local = [(_local(part, mesh.tensor, flat=flat), axes, apart) for part, axes, apart in parts]
            for zero_group, costs in zip(zero_groups, known, strict=True):
                counted = [
                    _state_costs(
                        part, min(_group(zero_group, mesh, apart), axes.data), cluster, axes, precision, accumulation, stages,
                        engine, resident=shares, reached=body.name in reached,
                    )
                    for part, axes, apart in local
                ]
                costs[body.name, placed] = {zero: reduce(add_states, (part[zero] for part in counted)) for zero in stages}
    return [
        tuple({body.name: costs[body.name, option[body.name].parameters] for body in graph.bodies} for option in options)
        for costs in known
    ]


def _replicas(parameters: _Held, experts: frozenset[str], mesh: Mesh) -> Sequence[tuple[_Held, Mesh, int]]:
    """Parameters by the ranks that hold copies of them: with the mesh as they see it, and how far apart their copies are.

    Context ranks hold what data ranks hold, and sum gradients with them. An expert is held by one in ``expert`` of those.
    """
    ranks = mesh.data * mesh.context
    dense = [pair for pair in parameters if pair[0].name not in experts]
    parts = [(dense, replace(mesh, data=ranks, context=1), 1)]
    if len(dense) < len(parameters):
        apart = [pair for pair in parameters if pair[0].name in experts]
        # Their copies lie ``expert`` apart: neighbours of the tensor axis do not matter to what follows.
        axes = replace(mesh, data=ranks // mesh.expert, context=1, expert=1, tensor=mesh.tensor * mesh.expert)
        parts.append((apart, axes, mesh.expert))
    return parts


def _group(zero_group: int, mesh: Mesh, apart: int) -> int:
    """The ZeRO group of parameters whose copies are so far apart."""
    ranks = mesh.data * mesh.context
    return max(1, (ranks if zero_group == mesh.data else min(zero_group, ranks)) // apart)


def add_states(first: StateCost, second: StateCost) -> StateCost:
    """Two parts of a block's state together."""
    return StateCost(*(getattr(first, f.name) + getattr(second, f.name) for f in fields(StateCost)))


def _tied(graph: ModelGraph) -> frozenset[str]:
    """Parameters that several blocks use."""
    uses = Counter(fqn for block in graph.blocks for fqn in {bound for _, bound in block.parameters})
    return frozenset(fqn for fqn, count in uses.items() if count > 1)


def _held(graph: ModelGraph, body: Body) -> list[str]:
    """The parameters that some block of the body is the first to use."""
    first: dict[str, int] = {}
    names: dict[str, None] = {}
    for index, block in enumerate(graph.blocks):
        for name, fqn in block.parameters:
            if first.setdefault(fqn, index) == index and block.body == body.name:
                names[name] = None
    return list(names)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Elements of one rank, of which it keeps a ``shard`` over ``group`` ranks: of ``tensors`` trained parameters, and of
    others (``frozen``). ``largest``: elements of the largest of all; ``partial``: of the trained shard, those that sum their
    gradients over the tensor axis."""

    group: int
    elements: int
    tensors: int
    shard: int
    frozen: int
    frozen_shard: int
    largest: int
    partial: int


_Local = tuple[tuple[tuple[int, ...], bool, bool], ...]
"""Of parameters: sizes of one rank's part, whether it is trained, and whether its gradient is summed over the tensor axis."""


def _local(parameters: _Held, degree: int, *, flat: bool) -> _Local:
    """``degree``: of the tensor axis that the placements divide over; ``flat``: ranks share a buffer of all elements in a row
    (Megatron's, DeepSpeed's), not the rows of each parameter."""
    def sizes(value: BodyValue, placed: Placement) -> tuple[int, ...]:
        local = local_type(value.type, placed, degree).sizes(1)
        return (prod(local),) if flat else local

    return tuple((sizes(value, placed), value.differentiable, placed.state == "shared") for value, placed in parameters)


@lru_cache(maxsize=4096)
def _sharded(parameters: _Local, group: int) -> _Shards:
    """FSDP2 pads every parameter's first dim to whole shards; the sum over the tensor axis is of shards."""
    counts = [(prod(sizes), shard_elements(sizes, group), trained, shared) for sizes, trained, shared in parameters]
    mine = [(whole, shard, shared) for whole, shard, trained, shared in counts if trained]
    others = [(whole, shard) for whole, shard, trained, _ in counts if not trained]
    return _Shards(
        group, elements=sum(whole for whole, _, _ in mine), tensors=len(mine), shard=sum(shard for _, shard, _ in mine),
        frozen=sum(whole for whole, _ in others), frozen_shard=sum(shard for _, shard in others),
        largest=max((whole for whole, *_ in counts), default=0), partial=sum(shard for _, shard, shared in mine if shared),
    )


def _state_costs(
    parameters: _Local, zero_group: int, cluster: Cluster, mesh: Mesh, precision: Precision, accumulation: int,
    stages: Sequence[int], engine: Engine, *, resident: bool, reached: bool,
) -> dict[int, StateCost]:
    """By ZeRO stage; 0 shards over no group."""
    found: dict[int, StateCost] = {}
    for group, some in ((1, [zero for zero in stages if not zero]), (zero_group, [zero for zero in stages if zero])):
        if some:
            held = _sharded(parameters, group)
            trained, frozen = Elements(held.elements, held.shard), Elements(held.frozen, held.frozen_shard)
            state = State(
                trained, frozen, group, cluster, mesh, precision, held.partial, held.tensors, accumulation, resident, reached,
                engine,
            )
            found.update((zero, _as_engine(state.cost(zero), held, zero, precision, engine)) for zero in some)
    return found


def _as_engine(state: StateCost, held: _Shards, zero: int, precision: Precision, engine: Engine) -> StateCost:
    if engine.gathers == "parameters":
        return gathered_one_by_one(state, held.largest, zero, precision)
    return flat_state(state, held.elements, held.group, zero, precision, engine) if engine.keeps == "fused" else state


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
