"""Whether a plan keeps constraints: one that was edited may not, and is then none of those that a certificate is about."""

from __future__ import annotations

from collections.abc import Mapping

from hardware_profiles import Cluster
from planner.constraints import LAYERED, Condition, Constraints, Limit, Value
from planner.ir.graph import ModelGraph
from planner.ir.placement import sequence_parallel
from planner.ir.plan import Plan, Prediction

Layers = tuple[tuple[str, Mapping[str, Value]], ...]
"""Names of blocks, and what each decides for itself."""


def broken_limit(
    constraints: Constraints, plan: Plan, graph: ModelGraph, cluster: Cluster, prediction: Prediction
) -> Limit | None:
    """The first limit that a plan does not keep, None where it keeps all."""
    whole, layers = _whole(plan), _layers(plan, graph)
    for condition in constraints.conditions:
        if not all(condition.admits(value) for value in _values(condition, whole, layers)):
            return condition
    for combination in constraints.forbidden:
        if all(any(c.admits(value) for value in _values(c, whole, layers)) for c in combination.conditions):
            return combination
    headroom, memory = constraints.headroom, cluster.chip.memory_bytes
    if headroom is not None and prediction.peak_memory_bytes > memory - headroom.of(memory):
        return headroom
    return None


def _values(condition: Condition, whole: Mapping[str, Value], layers: Layers) -> tuple[Value, ...]:
    """What a plan decides of what a condition is about: of layers, each that it names."""
    if condition.name in LAYERED:
        return tuple(decided[condition.name] for name, decided in layers if condition.covers(name))
    return (whole[condition.name],)


def _whole(plan: Plan) -> dict[str, Value]:
    return {
        **plan.mesh.degrees, "axis_order": plan.mesh.order, "microbatch": plan.batch.micro, "schedule": plan.schedule.name,
        "virtual": plan.schedule.virtual, "zero_group": plan.zero_group,
        "sequence_parallel": sequence_parallel(plan.placements),
    }


def _layers(plan: Plan, graph: ModelGraph) -> Layers:
    decisions = (decision for stage in plan.stages for decision in stage.decisions)
    return tuple(
        (block.name, {"zero": decision.zero, "recompute": decision.recompute})
        for block, decision in zip(graph.blocks, decisions, strict=True)
    )
