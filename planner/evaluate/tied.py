"""Parameters that several blocks share, and the sum of their gradients over pipeline ranks."""

from __future__ import annotations

from cost_models.collectives import collective_s
from cost_models.spans import span_among
from hardware_profiles import Cluster
from planner.ir.graph import ModelGraph, Parameter
from planner.ir.placement import Placement, local_type
from planner.ir.plan import (
    Mesh,
    Plan,
    Precision,
)


def tied_parameters(graph: ModelGraph) -> tuple[tuple[Parameter, tuple[int, ...]], ...]:
    """The parameters that several blocks use, with the blocks' indices."""
    return graph.tied


def tied_gradient_seconds(plan: Plan, graph: ModelGraph, cluster: Cluster) -> float:
    """Sum of the gradients of parameters whose copies live on different pipeline ranks, after the backward pass."""
    if plan.mesh.pipeline == 1:
        return 0.0
    total = 0.0
    stage_of = {block: stage for stage in plan.stages for block in range(stage.first, stage.last)}
    for parameter, owners in tied_parameters(graph):
        ranks = sorted({plan.rank_of_stage(stage_of[block].index) for block in owners})
        if len(ranks) < 2 or not parameter.trainable:
            continue
        stage = stage_of[owners[0]]
        zero = stage.decisions[owners[0] - stage.first].zero
        placement = parameter_placement(graph, plan, owners[0], parameter.fqn)
        elements = local_type(parameter.type, placement, plan.mesh.tensor).elements()
        total += tied_sum_seconds(cluster, plan.mesh, plan.precision, elements, zero, plan.zero_group, tuple(ranks))
    return total


def tied_sum_seconds(
    cluster: Cluster, mesh: Mesh, precision: Precision, elements: int, zero: int, zero_group: int, ranks: tuple[int, ...]
) -> float:
    """All-reduce of one tied gradient (fp32, or fp64; the own shard where ZeRO shards it) over its pipeline ranks."""
    size = elements * (8 if precision == "fp64" else 4) / (zero_group if zero else 1)
    apart = (ranks[-1] - ranks[0]) // (len(ranks) - 1)
    members = range(ranks[0], ranks[0] + (len(ranks) - 1) * apart + 1, apart)
    return collective_s("all_reduce", span_among(cluster, members, mesh.pipeline, mesh.pipeline_stride), size)


def parameter_placement(graph: ModelGraph, plan: Plan, block: int, fqn: str) -> Placement:
    """How the plan places a parameter of one block."""
    body = graph.body_of[graph.blocks[block].body]
    local = next(name for name, bound in graph.blocks[block].parameters if bound == fqn)
    names = [parameter.name for parameter in body.parameters]
    return plan.placements[body.name].parameters[names.index(local)]
