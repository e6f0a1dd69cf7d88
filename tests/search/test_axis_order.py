"""Whose neighbours are nearest: data ranks, or pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cost_models.collectives import collective_s, point_to_point_s
from cost_models.spans import span_of
from hardware_profiles import Cluster, Level, Link, resolve_cluster
from planner.evaluate import evaluate, send_seconds
from planner.evaluate.tied import tied_sum_seconds
from planner.ir.plan import AXIS_ORDERS, AxisOrder, Mesh
from planner.search import Request, parse_pins, search
from planner.search.candidates import enumerate_candidates
from tests.search.made import Always, make_cluster, make_costed, make_graph

NEAR: AxisOrder = "data-pipeline-tensor"


def two_nodes(memory: int, *, slow: float = 1e6) -> Cluster:
    """Two nodes of two devices, links between them a thousand times slower."""
    cluster = make_cluster(4, memory)
    return replace(
        cluster, nodes=2, devices_per_node=2,
        levels=(Level("node", 2, cluster.levels[0].link), Level("all", 4, Link("slow", slow, 1e-6, 1.0, 0.0, slow))),
    )


def test_the_other_order_is_a_candidate_where_it_changes_links() -> None:
    graph = make_graph("eaaaaaah")
    request = Request(16, 4, "fp32")
    flat, nodes = (enumerate_candidates(graph, cluster, request) for cluster in (make_cluster(4, 10**6), two_nodes(10**6)))
    assert {candidate.mesh.order for candidate in flat} == {AXIS_ORDERS[0]}
    other = {candidate.mesh for candidate in nodes if candidate.mesh.order == NEAR}
    # Pipelines inside nodes, data ranks across.
    assert other == {Mesh(pipeline=2, data=2, order=NEAR)}
    for order, cluster in itertools.product(AXIS_ORDERS, (two_nodes(10**6), make_cluster(4, 10**6))):
        pinned = replace(request, constraints=parse_pins([f"axis_order={order}"]))
        assert {candidate.mesh.order for candidate in enumerate_candidates(graph, cluster, pinned)} == {order}


def test_pipelines_that_lie_unlike_are_no_candidates() -> None:
    """Three ranks of eight: some pipelines would cross nodes and others not. What is sent is as slow as the slowest."""
    cluster = resolve_cluster("dgx-h100:3")
    candidates = enumerate_candidates(make_graph("e" + "a" * 10 + "h"), cluster, Request(24, 4, "fp32"))
    near = {candidate.mesh.pipeline * candidate.mesh.tensor for candidate in candidates if candidate.mesh.order == NEAR}
    assert 2 in near and not near & {3, 6, 12}
    inside, across = Mesh(pipeline=2, data=12, order=NEAR), Mesh(pipeline=3, data=8, order=NEAR)
    assert send_seconds(cluster, inside, 10**6) < send_seconds(cluster, across, 10**6)
    assert send_seconds(cluster, across, 10**6) == send_seconds(cluster, Mesh(pipeline=3, data=8), 10**6)


@pytest.mark.parametrize("sizes", [(8, 32, 40), (8, 24), (4, 12, 48)])
def test_what_is_sent_is_as_slow_as_the_slowest_pair(sizes: tuple[int, ...]) -> None:
    """In either order, also where a rack is not full: some pairs of a pipeline cross it and others do not."""
    base = resolve_cluster("dgx-h100:2")
    links = (base.levels[0].link, base.levels[1].link, replace(base.levels[1].link, bandwidth_bytes_s=1e9, peer_bytes_s=1e9))
    levels = tuple(Level(f"level{at}", size, link) for at, (size, link) in enumerate(zip(sizes, links, strict=False)))
    cluster = replace(base, levels=levels, nodes=sizes[-1] // sizes[0], devices_per_node=sizes[0])
    whole = range(1, cluster.devices + 1)
    for pipeline, tensor in ((p, t) for p in whole for t in whole if p > 1 and cluster.devices % (p * t) == 0):
        for order in AXIS_ORDERS:
            mesh = Mesh(pipeline=pipeline, data=cluster.devices // pipeline // tensor, tensor=tensor, order=order)
            pairs = itertools.product(range(pipeline - 1), range(mesh.data), range(tensor))
            slowest = max(point_to_point_s(cluster, mesh.pipeline_stride, 1e6, mesh.rank(*pair)) for pair in pairs)
            assert send_seconds(cluster, mesh, 1e6) == slowest, mesh


def test_a_tied_gradient_is_summed_by_the_ranks_that_have_it() -> None:
    """Four pipelines of four ranks, or of eight, each inside a node: what the first and the last sum crosses none."""
    cluster = resolve_cluster("dgx-h100:8")
    near, apart = (Mesh(pipeline=4, data=8, tensor=2, order=order) for order in (NEAR, AXIS_ORDERS[0]))
    inside, across = (tied_sum_seconds(cluster, mesh, "bf16", 10**8, 0, 1, (0, 3)) for mesh in (near, apart))
    assert inside == collective_s("all_reduce", span_of(cluster, 2, 4), 4e8)
    assert across == collective_s("all_reduce", span_of(cluster, 2, 8), 4e8) > 5 * inside


@pytest.mark.parametrize("mesh", [Mesh(2, 4, 1, 1, 3), Mesh(4, 2, 1, 1, 1), Mesh(3, 2, 2, 1, 2)])
def test_groups_lie_as_ranks_are_numbered(mesh: Mesh) -> None:
    for order in AXIS_ORDERS:
        ordered = replace(mesh, order=order)
        ranks = {(p, d): ordered.rank(p, d, 0) for p, d in itertools.product(range(mesh.pipeline), range(mesh.data))}
        assert len(set(ranks.values())) == mesh.pipeline * mesh.data
        assert {ranks[p + 1, d] - ranks[p, d] for p in range(mesh.pipeline - 1) for d in range(mesh.data)} == {
            ordered.pipeline_stride
        }
        assert all(ordered.place(rank)[:2] == place for place, rank in ranks.items())


def test_the_quicker_order_is_found() -> None:
    """Large values between blocks and few parameters want pipelines inside nodes; it is the other way round with many."""
    graph, found = make_graph("eaaaah"), {}
    for crossing, slow in ((10**9, 1e8), (4, 1e3)):
        costed = make_costed(graph, 3, zeros=(0, 1), crossing=crossing)
        cluster = two_nodes(10**13, slow=slow)
        steps = {}
        for order in (*AXIS_ORDERS, None):
            pins = ["pipeline=2", "tensor=1", "microbatch=1", "schedule=1f1b", *([f"axis_order={order}"] if order else [])]
            result = search(graph, cluster, Request(16, 4, "fp32", parse_pins(pins), gap=1e-6), costing=Always(costed))
            assert result.prediction == evaluate(result.plan, costed, cluster)
            steps[order] = result.prediction.step_s
        assert steps[None] == min(steps.values())
        found[crossing] = min(AXIS_ORDERS, key=steps.__getitem__)
    assert found[10**9] == NEAR


def test_the_data_axis_lies_across_nodes_behind_pipelines() -> None:
    cluster = resolve_cluster("dgx-h100:4")
    usual, near = Mesh(pipeline=4, data=8), Mesh(pipeline=4, data=8, order=NEAR)
    assert span_of(cluster, 8, usual.data_stride) == span_of(cluster, 8, 1)
    assert span_of(cluster, 8, near.data_stride) == span_of(cluster, 8, 4)
