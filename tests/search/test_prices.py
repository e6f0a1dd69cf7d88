"""What candidates cost does not depend on what was asked before, nor on what else is a candidate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.search import Request, parse_pins, search
from planner.search.candidates import enumerate_candidates
from planner.search.prices import Prices
from tests.costing.test_measured_memory import graph_of


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return graph_of("gpt", "float32")


def test_blocks_cost_the_same_whoever_is_priced_first(graph: ModelGraph) -> None:
    """A rank that keeps all of the state reduces gradients into as much again: it has other prices than one of several."""
    cluster = resolve_cluster("dgx-a100-80gb:1x4")
    request = Request(8, graph.sequence, "bf16", parse_pins(["tensor=1", "microbatch=1"]))
    candidates = enumerate_candidates(graph, cluster, request)
    alone, several = (next(c for c in candidates if c.mesh.data == data and c.mesh.pipeline > 1) for data in (1, 2))
    found = []
    for order in ((alone, several), (several, alone)):
        prices = Prices(graph, cluster, request, candidates)
        found.append({candidate: prices(candidate.first) for candidate in order})
    assert found[0] == found[1]
    first, second = (costed.blocks for costed in (found[0][alone], found[0][several]) if costed is not None)
    assert first != second, "or there is nothing to be mistaken about"


def test_placements_are_sought_at_the_same_micro_batches_under_a_pin(graph: ModelGraph) -> None:
    """And at those that the pin leaves: what it finds is no worse for it."""
    cluster = resolve_cluster("local-cpu:1x4")

    def references(*pins: str) -> set[int]:
        request = Request(48, graph.sequence, "fp32", parse_pins(["tensor=2", *pins]))
        return set(Prices(graph, cluster, request, enumerate_candidates(graph, cluster, request))._references(2))

    assert references() == {1, 8} == references("data=2")
    assert references("microbatch=12") == {1, 8, 12}


@pytest.mark.slow
def test_one_rank_may_free_its_copy(graph: ModelGraph) -> None:
    """Where only stage 3 fits, it is found without being asked for; where all do, nothing is sharded."""
    cluster = resolve_cluster("dgx-h100:1x1")
    room = next(room for room in range(40, 400) if _step(graph, cluster, room / 10, "zero=3") < math.inf) / 10
    assert _step(graph, cluster, room, "zero=0") == math.inf
    assert _step(graph, cluster, room) <= _step(graph, cluster, room, "zero=3") * 1.001
    result = search(graph, cluster, Request(4, graph.sequence, "bf16"))
    assert {decision.zero for stage in result.plan.stages for decision in stage.decisions} == {0}


def _step(graph: ModelGraph, cluster: Cluster, room_mib: float, *pins: str) -> float:
    """The best step in so much memory beside the reserve; infinite where nothing fits."""
    chip = replace(cluster.chip, memory_bytes=cluster.chip.reserve_bytes + round(room_mib * 2**20))
    request = Request(4, graph.sequence, "bf16", parse_pins(["microbatch=1", *pins]))
    try:
        return search(graph, replace(cluster, chip=chip), request).prediction.step_s
    except NoPlanFits:
        return math.inf
