"""A placed graph measured at several micro-batches is what it is when it is measured for each alone."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hardware_profiles import DEFAULT_ENGINE, Engine, resolve_cluster
from planner.costing import GraphWork, PlacedGraph, Pricing, least_costs, measure_graph, price_graph
from planner.ir.costed import BlockSeconds, CostedGraph
from planner.ir.graph import ModelGraph
from planner.ir.plan import Mesh
from planner.placement import place_graph
from tests.costing.test_ledger_memory import graph_of

CLUSTER = resolve_cluster("dgx-h100:1")
MICROBATCHES = (2, 1, 3, 64, 2)
"""One, where a dim of one sample lies otherwise, between others; and one twice."""


def placed(graph: ModelGraph, degree: int) -> PlacedGraph:
    options = place_graph(graph, degree, Pricing(CLUSTER, degree, 2))
    return PlacedGraph(graph, degree, tuple(option.placements for option in options))


def priced(counted: GraphWork, engine: Engine) -> CostedGraph:
    mesh = Mesh(pipeline=2, data=2, tensor=counted.degree)
    return price_graph(counted, CLUSTER, mesh=mesh, precision="bf16", zero_group=2, engine=engine)


def check(graph: PlacedGraph, microbatch: int, engine: Engine) -> None:
    alone = measure_graph(graph.graph, graph.degree, microbatch, graph.placements, engine=engine)
    assert priced(graph.measure(microbatch, engine=engine), engine) == priced(alone, engine)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("model", "precision"), [("gpt", "bf16"), ("llama", "fp32")])
def test_what_is_found_once_holds_at_every_micro_batch(model: str, precision: str, degree: int) -> None:
    graph = placed(graph_of(model, precision), degree)
    for microbatch in MICROBATCHES:
        check(graph, microbatch, Engine())


@pytest.mark.slow
def test_what_is_found_once_holds_for_every_engine() -> None:
    graph = placed(graph_of("gpt", "bf16"), 2)
    for engine in (Engine(), Engine(keeps="fused", attention="unfused"), Engine(selective="alternate"), Engine()):
        check(graph, 2, engine)


def test_bodies_placed_alike_are_measured_once() -> None:
    graph = placed(graph_of("llama", "bf16"), 2)
    blocks = graph.blocks(2)
    for body in graph.graph.bodies:
        distinct = {option[body.name] for option in graph.placements}
        assert len({id(option[body.name]) for option in blocks}) == len(distinct)


def test_a_bound_s_prices_are_those_of_the_blocks() -> None:
    graph = placed(graph_of("llama", "bf16"), 2)
    costs = priced(graph.measure(2), DEFAULT_ENGINE).blocks
    for option, least in zip(costs, least_costs(graph, Pricing(CLUSTER, 2, 2)), strict=True):
        for body, levels in option.items():
            for level, cost in levels.items():
                seconds, saved_bytes = least[body][level]
                assert saved_bytes == cost.saved_bytes
                assert all(getattr(seconds, field.name) == getattr(cost, field.name) for field in fields(BlockSeconds))
