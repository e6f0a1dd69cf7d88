"""The ledger of one rank."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, StageMemory
from planner.ledger.calls import CATEGORIES, Calls, Place, RankLedger, call, world_axis
from planner.ledger.data import data_calls
from planner.ledger.pipeline import cut_calls, tied_calls
from planner.ledger.tensor import block_calls, partial_gradient_call
from planner.ledger.units import units_of

SUMS_BYTES = 16
"""Loss and squared gradient norm, two float64."""


def representatives(plan: Plan) -> tuple[int, ...]:
    """The first rank of every pipeline rank: where shards are uneven, it holds the most."""
    return tuple(Place(pipeline, 0, 0).rank(plan.mesh) for pipeline in range(plan.mesh.pipeline))


def predict_rank(plan: Plan, graph: ModelGraph, rank: int, memory: StageMemory) -> RankLedger:
    """What a rank calls in a step. ``memory``: what the evaluator says of its pipeline rank."""
    place = Place.of(rank, plan.mesh)
    stages = plan.stages_of_rank(place.pipeline)
    units = {stage.index: units_of(plan, graph, stage, place.tensor) for stage in stages}
    calls: Calls = call("all_reduce", world_axis(plan.mesh), plan.mesh.devices, SUMS_BYTES)
    for part in (
        block_calls(plan, graph, stages),
        partial_gradient_call(plan, place, [unit for mine in units.values() for unit in mine]),
        data_calls(plan, graph, place.pipeline, units),
        cut_calls(plan, graph, place),
        tied_calls(plan, graph, place, units),
    ):
        calls.update(part)
    held = _bytes(memory)
    return RankLedger(rank, place.pipeline, dict(sorted(calls.items())), held, sum(held.values()) + memory.cached)


def _bytes(memory: StageMemory) -> Mapping[str, int]:
    return {category: getattr(memory, category) for category in CATEGORIES}
