"""Calls over the data axis: what ZeRO makes of every unit, and the weight of the loss' terms.

Bytes of one call, over a shard group of g ranks, with P the unit's padded elements: a gather gives P / g in the working
dtype, a reduction P in the master's dtype (float32 under bf16 and fp16); where the group is smaller than the data degree,
the shards' gradients, P / g, are summed over its copies once a step. ZeRO 0 sums the whole gradients once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cost_models.memory import MASTER_BYTES, WORKING_BYTES
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan
from planner.ledger.calls import Calls, call, shard_group
from planner.ledger.gathers import Turns, play
from planner.ledger.units import Unit

WEIGHT_BYTES = 8
"""A weight of a step's terms, one float64."""


def data_calls(plan: Plan, graph: ModelGraph, pipeline_rank: int, units: Mapping[int, Sequence[Unit]]) -> Calls:
    """``units``: of each virtual stage of the rank."""
    calls = call("all_reduce", "data", plan.mesh.data, WEIGHT_BYTES * len(graph.weights))
    played = play(plan, pipeline_rank, units)
    for stage, mine in units.items():
        for unit, turns in zip(mine, played[stage], strict=True):
            calls.update(_replicated(plan, unit) if unit.zero == 0 else _sharded(plan, unit, turns))
    return calls


def _replicated(plan: Plan, unit: Unit) -> Calls:
    trained = unit.padded(1, trained=True) * MASTER_BYTES[plan.precision]
    return call("all_reduce", "data", plan.mesh.data, trained, count=int(trained > 0))


def _sharded(plan: Plan, unit: Unit, turns: Turns) -> Calls:
    group, calls = shard_group(plan), Calls()
    whole = unit.padded(group) * WORKING_BYTES[plan.precision]
    trained = unit.padded(group, trained=True) * MASTER_BYTES[plan.precision]
    calls.update(call("all_gather", "data", group, whole // group, turns.gathers))
    if trained:
        calls.update(call("reduce_scatter", "data", group, trained, turns.reductions))
        calls.update(call("all_reduce", "data", plan.mesh.data // group, trained // group))
    return calls
