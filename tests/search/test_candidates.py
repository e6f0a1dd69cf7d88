"""The space: every degree of every axis, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cost_models.schedules import legal
from hardware_profiles import Cluster, Level, resolve_cluster
from planner.constraints_text import parse_constraints
from planner.ir.plan import AXIS_ORDERS, SCHEDULES
from planner.search.best import Best
from planner.search.candidates import candidates_of, enumerate_candidates
from planner.search.climb import Climb
from planner.search.request import Request, as_it_is
from tests.search.made import make_cluster, make_graph

BLOCKS, BATCH, DEVICES = "eaaaaaaaaaah", 24, 12


def nodes_of(size: int) -> Cluster:
    cluster = make_cluster(DEVICES, 10**6)
    link = cluster.levels[0].link
    levels = (Level("node", size, link), Level("all", DEVICES, link))
    return replace(cluster, nodes=DEVICES // size, devices_per_node=size, levels=levels)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def test_every_divisor_is_a_degree() -> None:
    """Tensor ranks over several nodes among them, and as many virtual stages as there are blocks for."""
    found = enumerate_candidates(make_graph(BLOCKS), nodes_of(2), Request(BATCH, 4, "fp32"))
    usual = [c for c in found if c.mesh.order == AXIS_ORDERS[0]]
    wanted = {
        (pipeline, tensor, micro, schedule, virtual)
        for pipeline in divisors(DEVICES) for tensor in divisors(DEVICES // pipeline)
        for data in (DEVICES // pipeline // tensor,) if BATCH % data == 0
        for micro in divisors(BATCH // data) for schedule in SCHEDULES for virtual in range(1, len(BLOCKS) // pipeline + 1)
        if (pipeline > 1 or schedule == "1f1b") and not legal(schedule, pipeline, virtual, BATCH // data // micro)
    }
    assert {(c.mesh.pipeline, c.mesh.tensor, c.micro, c.schedule, c.virtual) for c in usual} == wanted
    assert len(usual) == len(wanted)
    assert {c.mesh.tensor for c in usual} == set(divisors(DEVICES)) and max(c.virtual for c in usual) == len(BLOCKS) // 2


@pytest.mark.parametrize(("pins", "forbidden"), [
    ((), ()), (("zero_group!=2",), ()), (("tensor=2", "microbatch in [1,2]"), ()),
    ((), ("virtual=2, tensor=2", "axis_order=pipeline-tensor-data")), ((), ("zero_group=2, pipeline=2",)),
])
def test_what_is_counted_is_what_there_is(pins: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    """Each ZeRO group by itself, every candidate once; those apart, too, which are counted before they are made."""
    request, cluster = Request(BATCH, 4, "fp32", parse_constraints(pins, forbidden)), resolve_cluster("dgx-h100:2x6")
    found = candidates_of(make_graph(BLOCKS), cluster, request)
    each = [alone for kind in found.kinds for candidate in kind.candidates for alone in candidate.each]
    assert found.count == len(each) == len(set(each)) and found.apart
    nearest = [candidate for kind in found.nearest for candidate in kind.candidates]
    assert nearest == enumerate_candidates(make_graph(BLOCKS), cluster, request)


def test_what_is_forbidden_leaves_what_a_limit_would() -> None:
    """Schedules are one without a pipeline, and an order of the axes can change nothing: the one that is left counts then."""
    for name, value in (("schedule", "1f1b"), ("axis_order", AXIS_ORDERS[0]), ("axis_order", AXIS_ORDERS[1])):
        limited, refused = (
            enumerate_candidates(make_graph(BLOCKS), make_cluster(4, 10**6), Request(BATCH, 4, "fp32", constraints))
            for constraints in (parse_constraints([f"{name}!={value}"]), parse_constraints([], [f"{name}={value}"]))
        )
        assert set(limited) == set(refused) and any(candidate.mesh.pipeline == 1 for candidate in refused)


def test_a_climb_begins_inside_the_fastest_links() -> None:
    """However wide tensor degrees may be: practice keeps them there."""
    for size, widest in ((2, 2), (4, 4), (12, 12)):
        cluster = nodes_of(size)
        candidates = enumerate_candidates(make_graph(BLOCKS), cluster, Request(BATCH, 4, "fp32"))
        climb = Climb(dict.fromkeys(candidates, 1.0), cast(Any, SimpleNamespace(cluster=cluster)), Best(0.0, as_it_is))
        seeds = {seed.mesh.pipeline: seed for seed in climb.practised()}
        assert {pipeline: seed.mesh.tensor for pipeline, seed in seeds.items()} == {
            pipeline: max(t for t in divisors(DEVICES // pipeline) if t <= widest) for pipeline in divisors(DEVICES)
        }
        assert all(seed.micro == 1 for seed in seeds.values())
