"""The seconds that ZeRO's traffic is priced at are those of the calls that the ledger lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.collectives import collective_s
from cost_models.memory import WORKING_BYTES
from cost_models.spans import span_of
from hardware_profiles import DEFAULT_ENGINE, Cluster, resolve_cluster
from planner.costing.state_prices import state_costs
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan
from planner.ledger.calls import call
from planner.ledger.data import WEIGHT_BYTES, data_calls
from planner.ledger.units import units_of
from tests.costing.test_ledger_memory import graph_of
from tests.matrix.build import Row, make_plan

MODELS = ("averages", "adapted", "corners", "frozen")
ROWS = [
    *(Row(data=data, zero=zero, accumulation=3) for data in (2, 8) for zero in range(4)),
    *(Row(data=8, zero=zero, zero_group=2, accumulation=2) for zero in (1, 2, 3)),
]


def timeless() -> Cluster:
    """Eight devices whose own work takes no time."""
    cluster = resolve_cluster("dgx-h100:1")
    return replace(cluster, chip=replace(cluster.chip, memory_bandwidth=float("inf"), launch_s=0.0, memory_half_bytes=0.0))


def listed_seconds(plan: Plan, graph: ModelGraph, cluster: Cluster) -> float:
    """Of the ledger's calls, but the loss' weight, and what a unit without gradients has gathered ahead: prices do not know
    which block comes next."""
    (stage,), data, group = plan.stages, plan.mesh.data, plan.zero_group
    units = units_of(plan, graph, stage, 0)
    calls = data_calls(plan, graph, 0, {0: units})
    calls.subtract(call("all_reduce", "data", data, WEIGHT_BYTES))
    for unit in units:
        if unit.zero == 3 and unit.fetched and not unit.reached:
            calls.subtract(call("all_gather", "data", group, unit.padded(group) // group * WORKING_BYTES[plan.precision]))
    total = 0.0
    for made, count in calls.items():
        inside = made.kind != "all_reduce" or made.group == data
        span = span_of(cluster, made.group, 1 if inside else group)
        total += count * collective_s(made.kind, span, made.size_bytes)  # type: ignore[arg-type]
    return total


def priced_seconds(plan: Plan, graph: ModelGraph, cluster: Cluster) -> float:
    (stage,) = plan.stages
    (states,) = state_costs(
        graph, (plan.placements,), cluster, plan.mesh, plan.precision, plan.zero_group, plan.batch.accumulation,
        engine=replace(DEFAULT_ENGINE, collective_speed=1.0),
    )
    total = 0.0
    for block, decision in zip(graph.blocks, stage.decisions, strict=True):
        state = states[block.body][decision.zero]
        total += state.once_comm_s + plan.batch.accumulation * (state.forward_comm_s + state.backward_comm_s)
    return total


def test_flat_buffers_are_not_padded() -> None:
    """Of engines that keep parameters in a row: three rows over eight ranks are three eighths of a row each."""
    graph, cluster = graph_of("corners", "fp64"), timeless()
    plan, found = make_plan(graph, Row(data=8, zero=1), precision="fp64"), list[float]()
    span = span_of(cluster, 8, 1)
    for keeps in ("operations", "fused"):
        engine = replace(DEFAULT_ENGINE, collective_speed=1.0, keeps=keeps)
        (states,) = state_costs(graph, (plan.placements,), cluster, plan.mesh, plan.precision, 8, 1, engine=engine)
        found.append(sum(states[body.name][1].once_comm_s for body in graph.bodies))
    shards = [sum(-(-value.type.elements() // 8) for value in body.parameters) for body in graph.bodies]
    calls = [("all_gather", 8), ("reduce_scatter", 64)]
    expected = sum(collective_s(kind, span, size * shard) for shard in shards if shard for kind, size in calls)  # type: ignore[arg-type]
    assert found[1] == pytest.approx(expected, rel=1e-12) and found[0] > found[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_call_is_priced_and_no_other(model: str, precision: str) -> None:
    """Parameters that are not trained are gathered and not reduced, blocks that no gradient reaches for forward passes alone;
    first dims that ranks do not divide, or that are smaller than their number, are padded. A call's seconds are its start and
    its bytes, so a sum that is right has the calls and bytes of the ledger."""
    graph, cluster = graph_of(model, precision), timeless()
    for row in ROWS:
        plan = make_plan(graph, row, precision=precision)
        listed, priced = listed_seconds(plan, graph, cluster), priced_seconds(plan, graph, cluster)
        assert priced == pytest.approx(listed, rel=1e-12), row.label
