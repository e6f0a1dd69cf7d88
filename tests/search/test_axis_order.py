"""Whose neighbours are nearest: tensor ranks, data ranks, or pipelines."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from cost_models.collectives import collective_s, point_to_point_s
from cost_models.spans import span_of
from hardware_profiles import Cluster, Level, Link, resolve_cluster
from planner.constraints import Constraints
from planner.constraints_text import parse_constraints
from planner.evaluate import evaluate, evaluate_plan, send_seconds
from planner.evaluate.tied import tied_sum_seconds
from planner.ir.plan import AXIS_ORDERS, AxisOrder, Mesh
from planner.plan_file import dump, load, placed_for
from planner.search import Request, parse_pins, search
from planner.search.candidates import Kind, candidates_of, enumerate_candidates
from planner.search.meshes import meshes_of
from planner.search.prices import Prices
from planner.search.tensor_axes import Bounded, TensorAxes
from planner.trace import load_model, trace_model
from tests.search.made import Always, make_cluster, make_costed, make_graph

NEAR: AxisOrder = "data-pipeline-tensor"
WIDE_TABLES = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 400_000}


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


def test_pipelines_may_lie_unlike() -> None:
    """Three ranks of eight: some pipelines cross nodes and others do not. What is sent is as slow as the slowest."""
    cluster = resolve_cluster("dgx-h100:3")
    candidates = enumerate_candidates(make_graph("e" + "a" * 10 + "h"), cluster, Request(24, 4, "fp32"))
    near = {candidate.mesh.pipeline * candidate.mesh.tensor for candidate in candidates if candidate.mesh.order == NEAR}
    assert {2, 3, 6, 12} <= near
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
    """The axis that is named first is the slowest, one behind the other."""
    for order in AXIS_ORDERS:
        ordered = replace(mesh, order=order)
        places = list(itertools.product(range(mesh.pipeline), range(mesh.data), range(mesh.tensor)))
        ranks = [ordered.rank(*place) for place in places]
        assert len(set(ranks)) == len(places) and [ordered.place(rank) for rank in ranks] == places
        at = {"pipeline": 0, "data": 1, "tensor": 2}
        slowest_first = sorted(places, key=lambda place: [place[at[axis]] for axis in order.split("-")])
        assert [ordered.rank(*place) for place in slowest_first] == sorted(ranks)
        assert max(ranks) < mesh.devices


def clusters() -> list[Cluster]:
    """One or two levels of domains, and a last one that is not full."""
    base = resolve_cluster("dgx-h100:2")
    slower = replace(base.levels[1].link, bandwidth_bytes_s=1e9, peer_bytes_s=1e9)
    links = (base.levels[0].link, base.levels[1].link, slower)
    return [
        replace(
            base, nodes=sizes[-1] // sizes[0], devices_per_node=sizes[0],
            levels=tuple(Level(f"level{at}", size, link) for at, (size, link) in enumerate(zip(sizes, links, strict=False))),
        )
        for sizes in ((8, 64), (4, 16, 48), (8, 24), (6, 36), (8, 32, 40))
    ]


@pytest.mark.parametrize("cluster", clusters(), ids=lambda cluster: "x".join(str(level.size) for level in cluster.levels))
def test_an_order_that_is_no_candidate_has_the_links_of_one(cluster: Cluster) -> None:
    """To the byte and at every size."""
    graph, apart = make_graph("e" + "a" * 14 + "h"), 0
    every = dict[tuple[int, int, int], list[Mesh]]()
    for mesh in meshes_of(graph, cluster, Constraints()):
        every.setdefault((mesh.pipeline, mesh.data, mesh.tensor), []).append(mesh)
        apart += mesh.tensor_axis[1] > 1
    for (pipeline, data, tensor), kept in every.items():
        for order in AXIS_ORDERS:
            mesh = Mesh(pipeline=pipeline, data=data, tensor=tensor, order=order)
            if mesh not in kept:
                assert any(_seconds(other, cluster) == _seconds(mesh, cluster) for other in kept), mesh
    assert apart > 10


def _seconds(mesh: Mesh, cluster: Cluster) -> list[float]:
    spans = span_of(cluster, *mesh.tensor_axis), span_of(cluster, mesh.data, mesh.data_stride)
    return [
        seconds for size in range(10) for seconds in (
            send_seconds(cluster, mesh, 10**size),
            *(collective_s(kind, span, 10**size) for kind in ("all_reduce", "all_gather", "reduce_scatter") for span in spans),
        )
    ]


def test_tensor_ranks_may_be_apart() -> None:
    """Where that changes a link, here in nodes of two; also more of them than a node has."""
    graph, cluster, request = make_graph("eaaaaaah"), two_nodes(10**6), Request(16, 4, "fp32")
    found = candidates_of(graph, cluster, request)
    assert {kind.mesh for kind in found.apart} == {
        Mesh(data=2, tensor=2, order="pipeline-tensor-data"), Mesh(pipeline=2, tensor=2, order="tensor-pipeline-data"),
    }
    assert not {kind.mesh for kind in found.nearest} & {kind.mesh for kind in found.apart}
    wide = candidates_of(graph, resolve_cluster("dgx-h100:4"), replace(request, batch=64))
    assert {kind.mesh.tensor for kind in wide.apart} == {2, 4, 8, 16}
    for pin in ("axis_order=tensor-data-pipeline", "axis_order!=pipeline-data-tensor"):
        pinned = candidates_of(graph, cluster, replace(request, constraints=parse_constraints([pin])))
        assert pinned.kinds and all(parse_constraints([pin]).admits("axis_order", kind.mesh.order) for kind in pinned.kinds)


@pytest.mark.parametrize("pins", [(), ("axis_order=pipeline-tensor-data",)])
@pytest.mark.parametrize("memory", [2 * 10**6, 10**9])
def test_tensor_ranks_apart_are_bounded_together(memory: int, pins: tuple[str, ...]) -> None:
    """Of each degree first, then each axis, then its candidates; those that are left out before fit nowhere. (In the order that
    is pinned tensor ranks are nearest each other where there is one data rank: other meshes are not known to fit or not.)"""
    model = load_model("examples/gpt.py:gpt", {"layers": 4, "hidden": 256, "heads": 16}, 16)
    graph = trace_model(model, sequence=16, dtype="bfloat16")
    base, request = resolve_cluster("dgx-h100:8"), Request(64, 16, "bf16", parse_pins(pins))
    cluster = replace(base, chip=replace(base.chip, memory_bytes=base.chip.reserve_bytes + memory))
    candidates = candidates_of(graph, cluster, request)
    prices = Prices(graph, cluster, request, candidates.kinds)
    axes = TensorAxes(prices, candidates)
    for axis in axes.each:
        axes.find(axis)
    left, together = set[Kind](), 0
    for node in axes.apart():
        left.update(*node.kinds.values())
        together += len(node.kinds) > 1
        for part in node.parts(prices):
            assert len(part.kinds) == 1 and node.bound <= part.bound == max(node.bound, prices.bound_over(part.axes))
            raw = [bound for kinds in part.kinds.values() for kind in kinds for bound in Bounded.of(kind, prices).bounds]
            assert min(raw) >= part.bound * (1 - 1e-12) and len(raw) == len(part.bounds(prices))
    out = [kind for kind in candidates.apart if kind not in left]
    assert left and together and bool(out) == (memory < 10**9 and not pins)
    assert all(bound == math.inf for kind in out for bound in Bounded.of(kind, prices).bounds)


@pytest.mark.slow
def test_a_plan_whose_tensor_ranks_are_apart_is_found() -> None:
    """Tables of parameters and small activations: each node holds half of them, and sums no gradients with the other. No plan
    in another order is quicker, nor quicker than the bound of its tensor axis, and it is read from its file as it was."""
    graph = trace_model(load_model("examples/gpt.py:gpt", WIDE_TABLES, 16), sequence=16, dtype="bfloat16")
    cluster = resolve_cluster("dgx-h100:2x4")
    pins = ["tensor=2", "pipeline=1", "microbatch=64"]
    free = search(graph, cluster, Request(256, 16, "bf16", parse_pins(pins)))
    assert free.plan.mesh == Mesh(data=4, tensor=2, order="pipeline-tensor-data") and free.optimality_gap <= 0.001
    assert free.prediction.step_s == evaluate_plan(free.plan, graph, cluster).step_s
    placed = placed_for(free.plan, graph, cluster)
    text = dump(free.plan, free.prediction, graph, free.certificate, placed_for=placed)
    assert load(text, "plan.yaml", graph, cluster)[0] == free.plan
    steps = {}
    for order in AXIS_ORDERS:
        request = Request(256, 16, "bf16", parse_pins([*pins, f"axis_order={order}"]))
        result = search(graph, cluster, request)
        steps[order] = result.prediction.step_s
        prices = Prices(graph, cluster, request, candidates_of(graph, cluster, request).kinds)
        tensor, stride = result.plan.mesh.tensor_axis
        assert prices.bound_over((tensor, (stride,))) < steps[order]
    assert free.prediction.step_s <= min(steps.values()) / 0.999 and max(steps.values()) > 1.05 * min(steps.values())


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
