"""cost_graph: every block kind of a graph, under every option, recomputation level and ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping

from hardware_profiles import Cluster
from planner.costing.blocks import context_seconds, cost_block, parameter_elements
from planner.costing.pricing import Pricing
from planner.costing.states import cost_state
from planner.ir.costed import RECOMPUTE_LEVELS, BlockCost, CostedGraph, Recompute, StateCost
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement, local_type
from planner.ir.plan import Mesh, Precision

ZERO_STAGES = (0, 1, 2, 3)


def cost_graph(
    graph: ModelGraph, cluster: Cluster, *, mesh: Mesh, microbatch: int, precision: Precision, zero_group: int,
    options: tuple[Mapping[str, BodyPlacement], ...],
) -> CostedGraph:
    """Price every option (a placement for each body, by its name) for one candidate."""
    pricing = Pricing(cluster, mesh.tensor, microbatch)
    return CostedGraph(
        graph, mesh.tensor, microbatch, options,
        blocks=tuple(_block_costs(graph, option, pricing) for option in options),
        states=tuple(_state_costs(graph, option, cluster, mesh, precision, zero_group) for option in options),
        crossing_bytes=tuple(_crossing_bytes(graph, option, microbatch) for option in options),
        context_s=context_seconds(graph.context, pricing),
    )


def _block_costs(
    graph: ModelGraph, option: Mapping[str, BodyPlacement], pricing: Pricing
) -> dict[str, dict[Recompute, BlockCost]]:
    return {
        body.name: {level: cost_block(body, option[body.name], pricing, level) for level in RECOMPUTE_LEVELS}
        for body in graph.bodies
    }


def _state_costs(
    graph: ModelGraph, option: Mapping[str, BodyPlacement], cluster: Cluster, mesh: Mesh, precision: Precision,
    zero_group: int,
) -> dict[str, dict[int, StateCost]]:
    return {
        body.name: {
            zero: cost_state(
                parameter_elements(body, option[body.name]), zero, cluster, mesh, precision, zero_group
            )
            for zero in ZERO_STAGES
        }
        for body in graph.bodies
    }


def _crossing_bytes(graph: ModelGraph, option: Mapping[str, BodyPlacement], microbatch: int) -> dict[int, int]:
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        placement = option[block.body]
        for name, placed in zip(block.writes, placement.outputs, strict=True):
            local = local_type(graph.activation_types[name], placed, placement.degree)
            sizes[name] = local.size_bytes(microbatch)
    return {cut: sum(sizes[name] for name in graph.crossing(cut)) for cut in range(1, len(graph.blocks))}
