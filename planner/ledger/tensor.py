"""Calls over the tensor axis: inside the blocks for every micro-batch, and the one sum of partial gradients a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cost_models.memory import MASTER_BYTES
from planner.costing.local import localise
from planner.costing.repeated import repeated_nodes
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, StagePlan
from planner.ledger.calls import Call, Calls, Place, call, shard_group
from planner.ledger.units import Unit
from planner.placement.ledger import collectives


def block_calls(plan: Plan, graph: ModelGraph, stages: Sequence[StagePlan]) -> Calls:
    """What the blocks of a rank's stages call in all micro-batches of a step, forward, backward and repeated."""
    kinds = Counter(
        (block.body, decision.recompute)
        for stage in stages
        for block, decision in zip(graph.blocks[stage.first : stage.last], stage.decisions, strict=True)
    )
    calls: Calls = Counter()
    for (name, recompute), blocks in kinds.items():
        body, placement = graph.body_of[name], plan.placements[name]
        repeated = repeated_nodes(localise(body, placement, plan.batch.micro), recompute)
        for counts in collectives(body, placement, plan.mesh.tensor, plan.batch.micro, repeated=repeated):
            for item in counts:
                made = Call(item.kind, "tensor", plan.mesh.tensor, item.size_bytes)
                calls[made] += item.count * blocks * plan.batch.accumulation
    return calls


def partial_gradient_call(plan: Plan, place: Place, units: Sequence[Unit]) -> Calls:
    """The sum of all gradients that are partial over the tensor axis: one call, of the elements that the rank holds."""
    group = shard_group(plan)
    partial = [(p, unit.zero) for unit in units for p in unit.parameters if p.partial]
    if not partial:
        return Counter()
    elements = sum(p.held(group, place.data % group) if zero else p.held(1, 0) for p, zero in partial)
    return call("all_reduce", "tensor", plan.mesh.tensor, elements * MASTER_BYTES[plan.precision])
