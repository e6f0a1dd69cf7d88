"""cost_graph: every block kind of a graph, under every option, recomputation level and ZeRO stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from cost_models.memory import shard_elements
from hardware_profiles import Cluster
from planner.costing.activations import context_bytes
from planner.costing.blocks import context_seconds, cost_block
from planner.costing.pricing import Pricing
from planner.costing.states import cost_state
from planner.ir.costed import RECOMPUTE_LEVELS, BlockCost, CostedGraph, Recompute, StateCost
from planner.ir.graph import Body, BodyValue, ModelGraph
from planner.ir.placement import BodyPlacement, Placement, local_type
from planner.ir.plan import Mesh, Precision
from planner.rules import has_rule

ZERO_STAGES = (0, 1, 2, 3)
BlockCosts = dict[str, dict[Recompute, BlockCost]]
"""By body and recomputation level."""
StateCosts = dict[str, dict[int, StateCost]]
"""By body and ZeRO stage."""


def cost_graph(
    graph: ModelGraph, cluster: Cluster, *, mesh: Mesh, microbatch: int, precision: Precision, zero_group: int,
    options: tuple[Mapping[str, BodyPlacement], ...], accumulation: int = 2,
) -> CostedGraph:
    """Price every option (a placement for each body, by its name) for one candidate. ``accumulation``: micro-batches of a
    step."""
    pricing = Pricing(cluster, mesh.tensor, microbatch)
    return CostedGraph(
        graph, mesh.tensor, microbatch, options,
        blocks=block_costs(graph, options, pricing),
        states=tuple(
            state_costs(graph, option, cluster, mesh, precision, zero_group, accumulation) for option in options
        ),
        crossing_bytes=tuple(_crossing_bytes(graph, option, microbatch) for option in options),
        context_s=context_seconds(graph.context, pricing),
        context_bytes=context_bytes(graph, microbatch),
        batch_bytes=sum(item.type.size_bytes(microbatch) for item in graph.batch_inputs),
        warnings=replicated_operations(graph) if mesh.tensor > 1 else (),
    )


def replicated_operations(graph: ModelGraph) -> tuple[str, ...]:
    """What the plan says aloud: operations without a sharding rule, which every tensor rank runs whole."""
    unknown = {(body.name, node.op) for body in graph.bodies for node in body.nodes if not has_rule(node)}
    return tuple(
        f"{body}: {op} has no sharding rule: every tensor rank runs it whole" for body, op in sorted(unknown)
    )


def block_costs(
    graph: ModelGraph, options: Sequence[Mapping[str, BodyPlacement]], pricing: Pricing
) -> tuple[BlockCosts, ...]:
    """Every body under every recomputation level, for every option."""
    return tuple(
        {
            body.name: {level: cost_block(body, option[body.name], pricing, level) for level in RECOMPUTE_LEVELS}
            for body in graph.bodies
        }
        for option in options
    )


def state_costs(
    graph: ModelGraph, option: Mapping[str, BodyPlacement], cluster: Cluster, mesh: Mesh, precision: Precision,
    zero_group: int, accumulation: int = 2,
) -> StateCosts:
    """The state of every body under every ZeRO stage. Without a pipeline a parameter that several blocks share is held
    once, by the first of them."""
    tied = _tied(graph) if mesh.pipeline == 1 else frozenset()
    costs: StateCosts = {}
    for body in graph.bodies:
        bound = [dict(block.parameters) for block in graph.blocks if block.body == body.name]
        shares = mesh.pipeline == 1 and any(fqn in tied for names in bound for fqn in names.values())
        held = _held(graph, body) if shares else [value.name for value in body.parameters]
        mine = [pair for pair in zip(body.parameters, option[body.name].parameters, strict=True) if pair[0].name in held]
        costs[body.name] = {
            zero: _state_cost(mine, zero, cluster, mesh, precision, zero_group, accumulation, resident=shares)
            for zero in ZERO_STAGES
        }
    return costs


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


def _state_cost(
    parameters: Sequence[tuple[BodyValue, Placement]], zero: int, cluster: Cluster, mesh: Mesh, precision: Precision,
    zero_group: int, accumulation: int, *, resident: bool,
) -> StateCost:
    """FSDP2 pads every parameter's first dim to whole shards; the sum over the tensor axis is of shards."""
    group = min(zero_group, mesh.data) if zero else 1
    elements = shard = partial = 0
    for value, placed in parameters:
        if value.differentiable:
            sizes = local_type(value.type, placed, mesh.tensor).sizes(1)
            elements += prod(sizes)
            shard += shard_elements(sizes, group)
            partial += shard_elements(sizes, group) if placed.state == "shared" else 0
    return cost_state(
        elements, zero, cluster, mesh, precision, zero_group, shard=shard, partial_elements=partial,
        accumulation=accumulation, resident=resident,
    )


def _crossing_bytes(graph: ModelGraph, option: Mapping[str, BodyPlacement], microbatch: int) -> dict[int, int]:
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        placement = option[block.body]
        for name, placed in zip(block.writes, placement.outputs, strict=True):
            local = local_type(graph.activation_types[name], placed, placement.degree)
            sizes[name] = local.size_bytes(microbatch)
    return {cut: sum(sizes[name] for name in graph.crossing(cut)) for cut in range(1, len(graph.blocks))}
