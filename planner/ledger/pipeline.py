"""Calls over the pipeline axis: activations and their gradients across the cuts, and the sums of tied gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cost_models.memory import MASTER_BYTES
from planner.ir.graph import ModelGraph
from planner.ir.placement import local_type
from planner.ir.plan import Plan
from planner.ledger.calls import Calls, Place, call, shard_group
from planner.ledger.units import LocalParameter, Unit


def cut_calls(plan: Plan, graph: ModelGraph, place: Place) -> Calls:
    """Sends and receives of a rank in a step: each value that crosses a cut between two ranks once a micro-batch, and its
    gradient back."""
    calls: Calls = Counter()
    for stage in plan.stages[1:]:
        before, after = plan.rank_of_stage(stage.index - 1), plan.rank_of_stage(stage.index)
        if before == after or place.pipeline not in (before, after):
            continue
        forward, backward = ("send", "recv") if place.pipeline == before else ("recv", "send")
        for size, differentiable in _crossing(plan, graph, stage.first, place.tensor):
            calls.update(call(forward, "pipeline", plan.mesh.pipeline, size, plan.batch.accumulation))
            if differentiable:
                calls.update(call(backward, "pipeline", plan.mesh.pipeline, size, plan.batch.accumulation))
    return calls


def _crossing(plan: Plan, graph: ModelGraph, cut: int, tensor_rank: int) -> Iterator[tuple[int, bool]]:
    """(bytes on one tensor rank of one micro-batch, whether a gradient comes back) of each value that crosses a cut."""
    for name in graph.crossing(cut):
        block = graph.blocks[graph.producer_of[name]]
        body, at = graph.body_of[block.body], block.writes.index(name)
        placed = plan.placements[body.name].outputs[at]
        local = local_type(graph.activation_types[name], placed, plan.mesh.tensor, tensor_rank)
        yield local.size_bytes(plan.batch.micro), body.outputs[at] in body.differentiable


def tied_calls(plan: Plan, graph: ModelGraph, place: Place, units: Mapping[int, Sequence[Unit]]) -> Calls:
    """The sums of the gradients of parameters whose copies are on several pipeline ranks, one call each a step."""
    stage_of = {block: stage.index for stage in plan.stages for block in range(stage.first, stage.last)}
    group, calls = shard_group(plan), Calls()
    mine = {p.fqn: (p, unit.zero) for stage in units.values() for unit in stage for p in unit.parameters if p.trainable}
    for fqn, (parameter, zero) in mine.items():
        ranks = {plan.rank_of_stage(stage_of[block]) for block in graph.tied_blocks(fqn)}
        size = _held(parameter, zero, group, place) * MASTER_BYTES[plan.precision]
        calls.update(call("all_reduce", "pipeline", len(ranks), size))
    return calls


def _held(parameter: LocalParameter, zero: int, group: int, place: Place) -> int:
    """Elements of a parameter that are on the rank."""
    return parameter.held(group, place.data % group) if zero else parameter.held(1, 0)
