"""A placed graph measured at several micro-batches is what it is when it is measured for each alone."""

from __future__ import annotations

import pytest

from hardware_profiles import Engine, resolve_cluster
from planner.costing import PlacedGraph, Pricing, measure_graph
from planner.costing.graphs import GraphWork
from planner.ir.graph import ModelGraph
from planner.placement import place_graph
from tests.costing.test_ledger_memory import graph_of

CLUSTER = resolve_cluster("dgx-h100:1")
MICROBATCHES = (2, 1, 3, 64, 2)
"""One, where a dim of one sample lies otherwise, between others; and one twice."""


def placed(graph: ModelGraph, degree: int) -> PlacedGraph:
    options = place_graph(graph, degree, Pricing(CLUSTER, degree, 2))
    return PlacedGraph(graph, degree, tuple(option.placements for option in options))


def alone(graph: PlacedGraph, microbatch: int, **settings: Engine) -> GraphWork:
    return measure_graph(graph.graph, graph.degree, microbatch, graph.placements, **settings)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("llama", "fp32")])
def test_what_is_found_once_holds_at_every_micro_batch(model: str, precision: str, degree: int) -> None:
    graph = placed(graph_of(model, precision), degree)
    for microbatch in MICROBATCHES:
        assert graph.measure(microbatch) == alone(graph, microbatch)


def test_what_is_found_once_holds_for_every_engine() -> None:
    graph = placed(graph_of("gpt", "bf16"), 2)
    for engine in (Engine(), Engine(keeps="fused", attention="unfused"), Engine(selective="alternate"), Engine()):
        assert graph.measure(2, engine=engine) == alone(graph, 2, engine=engine)


def test_bodies_placed_alike_are_measured_once() -> None:
    graph = placed(graph_of("llama", "bf16"), 2)
    blocks = graph.blocks(2)
    for body in graph.graph.bodies:
        distinct = {option[body.name] for option in graph.placements}
        assert len({id(option[body.name]) for option in blocks}) == len(distinct)
