"""What `--top` passes over, and how it is written: constraints that mean the same when they are read again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner.constraints import Constraints
from planner.constraints_text import parse_constraints, parse_texts
from planner.distinct import essence, passed_over
from planner.ir.plan import AXIS_ORDERS, Batch, BlockDecision, Mesh, Plan, Schedule, StagePlan
from planner.search import Request
from planner.search.candidates import Candidate, allowed_choices, enumerate_candidates
from planner.search.meshes import links_of
from tests.search.made import make_graph

GRAPH = make_graph("eaah")
CLUSTERS = {name: resolve_cluster(name) for name in ("dgx-h100:1x6", "dgx-h100:2", "dgx-h100:3")}
BATCH = 24


def plan_of(candidate: Candidate, zero: int = 0) -> Plan:
    """Any plan of it."""
    stages = (StagePlan(0, 0, 4, (BlockDecision(zero, "none"),) * 4),)
    batch, schedule = Batch(BATCH, candidate.micro, candidate.accumulation), Schedule(candidate.schedule, candidate.virtual)
    return Plan("made", "", "made", "", "fp32", 4, candidate.mesh, batch, schedule, candidate.zero_group, stages, {})


def first_alike(mesh: Mesh, cluster: Cluster) -> Mesh:
    """In the first order with the same links."""
    ordered = (replace(mesh, order=order) for order in AXIS_ORDERS)
    return next(each for each in ordered if links_of(each, cluster) == links_of(mesh, cluster))


Key = tuple[Mesh, int, str, int, int]


def choices(constraints: Constraints, cluster: Cluster) -> dict[Key, set[tuple[str, int]]]:
    """By what candidates decide, but for an order of axes that changes nothing: the ZeRO stages and levels that are left."""
    found: dict[Key, set[tuple[str, int]]] = {}
    for several in enumerate_candidates(GRAPH, cluster, Request(BATCH, 4, "fp32", constraints)):
        for each in several.each:
            mesh = first_alike(each.mesh, cluster)
            key = (mesh, each.micro, each.schedule, each.virtual, each.zero_group)
            spaces = allowed_choices(each, constraints, GRAPH)
            found.setdefault(key, set()).update((level, zero) for s in spaces for level in s.recompute for zero in s.zero)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("pins", [(), ("axis_order in [pipeline-data-tensor,data-pipeline-tensor]",), ("zero=0",),
                                  (f"axis_order in [{','.join(AXIS_ORDERS)}]",), ("axis_order!=tensor-data-pipeline",),
                                  ("zero_group!=3",), ("zero>=2",), ("tensor=1", "schedule in [1f1b,gpipe]")], ids=" ".join)
def test_all_plans_but_those_passed_over_are_left_and_no_others(name: str, pins: tuple[str, ...]) -> None:
    cluster, asked = CLUSTERS[name], parse_constraints(pins)
    before = choices(asked, cluster)
    request = Request(BATCH, 4, "fp32", asked)
    candidates = [each for several in enumerate_candidates(GRAPH, cluster, request) for each in several.each]
    without = asked
    for candidate in candidates[:: max(1, len(candidates) // 4)]:
        passed = passed_over(plan_of(candidate), cluster, asked)
        without = without.with_(*(each for each in passed if each not in without.forbidden))
        left = choices(parse_texts(without.written, "plan.yaml"), cluster)
        mesh = first_alike(candidate.mesh, cluster)
        gone = {
            key for key in before
            if key[:2] == (mesh, candidate.micro) and key[3] == candidate.virtual
            and (mesh.pipeline == 1 or key[2] == candidate.schedule) and (pins == ("zero=0",) or key[4] == candidate.zero_group)
        }
        assert gone, "the plan's own candidate is passed over"
        before = {key: left for key, left in before.items() if key not in gone}
        assert left == before


def test_an_order_of_axes_that_changes_no_link_only_looks_different() -> None:
    near = Mesh(pipeline=2, data=8, order="data-pipeline-tensor")
    candidate = Candidate(near, 1, 3, "1f1b", 1, ((8,),))
    plan = plan_of(candidate)
    usual = replace(plan, mesh=replace(near, order=AXIS_ORDERS[0]))
    nodes = CLUSTERS["dgx-h100:2"]
    flat = replace(nodes, nodes=1, devices_per_node=16, levels=(replace(nodes.levels[0], size=16),))
    assert essence(plan, nodes) != essence(usual, nodes)
    assert essence(plan, flat) == essence(usual, flat)
