"""Whole chains: the boundary's options, tied parameters, completion from a plan file, and the ledger."""

from __future__ import annotations

import itertools
import math

import pytest

from planner.ir.body import Body
from planner.ir.errors import InternalError, PlanFileError
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, SHARED, BodyPlacement, Placement, shard
from planner.placement import Option, options, place_body, place_graph
from planner.placement.complete import complete
from planner.placement.ledger import collectives
from planner.placement.options import GAIN, body_boundary
from planner.placement.seconds import body_seconds
from planner.placement.space import DIVIDED_STATE, Space
from planner.placement.verify import verify
from tests.placement import dense


def _option(graph: ModelGraph, *, sequence_parallel: bool, degree: int = 2) -> Option:
    found = place_graph(graph, degree, dense.DensePricing(degree), rules=dense.table)
    return min((o for o in found if o.sequence_parallel == sequence_parallel), key=lambda o: o.state_elements)


def _kinds(body: Body, placement: BodyPlacement) -> tuple[list[str], list[str]]:
    forward, backward = collectives(body, placement, placement.degree, 8)
    return [c.kind for c in forward for _ in range(c.count)], [c.kind for c in backward for _ in range(c.count)]


def test_a_layer_is_split_by_columns_then_rows_with_one_all_reduce_each_way() -> None:
    graph = dense.chain(3, tied=False)
    placement = _option(graph, sequence_parallel=False).placements["Layer"]
    assert placement.parameters[0] in (SHARED, REPLICATE) and placement.parameters[1:] == (shard(0), shard(1))
    assert _kinds(graph.body_of["Layer"], placement) == (["all_reduce"], ["all_reduce"])


def test_a_split_boundary_gathers_and_scatters_and_shares_the_norms_weight() -> None:
    graph = dense.chain(24, tied=False)
    option = _option(graph, sequence_parallel=True)
    assert option.boundary == shard(1)
    placement = option.placements["Layer"]
    assert placement.parameters == (SHARED, shard(0), shard(1))
    assert _kinds(graph.body_of["Layer"], placement) == (["all_gather", "reduce_scatter"],) * 2


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_split_over_the_vocabulary(tied: bool) -> None:
    graph = dense.chain(2, tied=tied)
    option = _option(graph, sequence_parallel=False)
    assert option.placements["First"].parameters == (shard(0),) or not tied
    assert option.placements["Last"].parameters == (shard(0),)
    assert _kinds(graph.body_of["Last"], option.placements["Last"]) == (["all_reduce"] * 3, ["all_reduce"])


def test_tied_parameters_lie_alike_in_all_their_bodies() -> None:
    graph = dense.chain(2, tied=True)
    assert graph.tied_slots == (frozenset({("First", "w"), ("Last", "w")}),)
    assert dense.chain(2, tied=False).tied_slots == ()
    for option in place_graph(graph, 4, dense.DensePricing(4), rules=dense.table):
        assert option.placements["First"].parameters == option.placements["Last"].parameters


@pytest.mark.parametrize("boundary", [REPLICATE, shard(1)])
def test_one_problem_finds_the_best_combination_of_tied_placements(boundary: Placement) -> None:
    graph, pricing, split = dense.chain(2, tied=True), dense.DensePricing(2), boundary.state == "shard"
    alone = []
    for tied in (REPLICATE, SHARED, shard(0), shard(1)):
        placed = [
            place_body(
                body, 2, body_boundary(graph, body, boundary), {"w": tied} if body.name != "Layer" else {}, pricing,
                rules=dense.table, activations="split" if split else "whole",
            )
            for body in graph.bodies
        ]
        if None not in placed:
            alone.append(sum(each.seconds * (2 if at == 1 else 1) for at, each in enumerate(placed) if each is not None))
    found = place_graph(graph, 2, pricing, rules=dense.table, split=split, prices=(0.0,))
    assert len(alone) > 1 and found[0].seconds == pytest.approx(min(alone), rel=1e-9)


@pytest.mark.parametrize("split", [False, True])
def test_tied_parameters_have_their_best_placement_for_every_number_of_micro_batches(split: bool) -> None:
    graph, boundary = dense.chain(2, tied=True), shard(1) if split else REPLICATE
    ends = [graph.body_of[name] for name in ("First", "Last")]
    found = place_graph(graph, 4, dense.DensePricing(4, batch=1, accumulation=1), rules=dense.table, split=split)
    quickest = set()
    for accumulation in (1, 2, 4, 8, 1000):
        pricing = dense.DensePricing(4, batch=1, accumulation=accumulation)
        seconds = [sum(body_seconds(body, each.placements[body.name], pricing) for body in ends) for each in found]
        quickest.add(found[seconds.index(min(seconds))].placements["Last"].parameters)
        for tied in (REPLICATE, SHARED, shard(0), shard(1)):
            placed = [
                place_body(
                    body, 4, body_boundary(graph, body, boundary), {"w": tied}, pricing,
                    rules=dense.table, activations="split" if split else "whole",
                )
                for body in ends
            ]
            best = sum(math.inf if each is None else each.seconds for each in placed)
            assert min(seconds) <= best * (1 + GAIN), f"{tied} is quicker with {accumulation} micro-batches"
    assert len(quickest) > 1 or not split


def test_what_is_quickest_and_holds_least_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, cheapest, cases = list[Space](), options.cheapest_picks, list(itertools.product((False, True), (2, 4)))

    def noted(space: Space) -> object:
        solved.append(space)
        return cheapest(space)

    def placed() -> list[tuple[Option, ...]]:
        solved.clear()
        return [
            place_graph(dense.chain(2, tied=tied), degree, dense.DensePricing(degree), rules=dense.table)
            for tied, degree in cases
        ]

    monkeypatch.setattr(options, "cheapest_picks", noted)
    found, few = placed(), len(solved)
    monkeypatch.setattr(options._Solver, "_holds_least", lambda self, body, placed: False)
    assert placed() == found and few < len(solved)


def test_bodies_that_share_many_parameters_are_placed_as_well_as_alone() -> None:
    graph, pricing = dense.shared_stacks(5), dense.DensePricing(2)
    assert len(graph.tied_slots) == 15
    best = place_graph(graph, 2, pricing, rules=dense.table, split=False, prices=(0.0,))[0]
    one, other = (best.placements[name] for name in ("Once", "Again"))
    assert one.parameters == other.parameters
    alone = place_body(graph.body_of["Once"], 2, {}, {}, pricing, rules=dense.table, activations="whole")
    assert alone is not None and best.seconds <= 2 * alone.seconds * (1 + 1e-9)


def test_every_option_is_legal_and_costs_what_its_blocks_cost() -> None:
    graph = dense.chain(3, tied=True)
    found = place_graph(graph, 2, dense.DensePricing(2), rules=dense.table)
    assert [option.seconds for option in found] == sorted(option.seconds for option in found)
    for option in found:
        for body in graph.bodies:
            verify(body, option.placements[body.name], rules=dense.table)


def test_one_rank_holds_everything() -> None:
    graph = dense.chain(2, tied=True)
    (option,) = place_graph(graph, 1, dense.DensePricing(1), rules=dense.table)
    assert option.boundary == REPLICATE and not option.sequence_parallel
    for body in graph.bodies:
        verify(body, option.placements[body.name], rules=dense.table)
        assert collectives(body, option.placements[body.name], 1, 8) == ((), ())


def test_boundary_and_parameters_are_enough_to_complete_a_placement() -> None:
    graph = dense.chain(2, tied=True)
    pricing = dense.DensePricing(2)
    for option in place_graph(graph, 2, pricing, rules=dense.table):
        for body in graph.bodies:
            placement = option.placements[body.name]
            boundary = dict(zip((v.name for v in body.inputs), placement.inputs, strict=True))
            boundary |= zip(body.outputs, placement.outputs, strict=True)
            parameters = dict(zip((p.name for p in body.parameters), placement.parameters, strict=True))
            assert complete(body, 2, boundary, parameters, pricing, rules=dense.table) == placement


@pytest.mark.parametrize(("boundary", "changed", "message"), [
    ({}, {"a": shard(0)}, "no placement of its operations"),
    ({}, {"d": REPLICATE}, "d is no parameter"),
    ({"y": REPLICATE}, {}, "y is no input or output"),
    ({"x": shard(3)}, {}, "a dim from 0 to 2"),
    ({"x": shard(0)}, {}, "divide evenly"),
    ({"x": SHARED}, {}, "x is shared"),
])
def test_a_plan_file_that_cannot_be_is_refused(boundary: dict, changed: dict, message: str) -> None:  # type: ignore[type-arg]
    parameters = {"a": REPLICATE, "b": shard(0), "c": shard(1)} | changed
    with pytest.raises(PlanFileError, match=message):
        complete(dense.layer(), 2, boundary, parameters, dense.DensePricing(2), rules=dense.table)


def test_recomputing_a_block_repeats_its_forward_collectives() -> None:
    body = dense.layer()
    boundary, pricing = {"x": shard(1), "n4": shard(1)}, dense.DensePricing(2)
    placed = place_body(body, 2, boundary, {}, pricing, rules=dense.table, state_price=DIVIDED_STATE)
    assert placed is not None
    _, plain = collectives(body, placed.placement, 2, 8)
    _, repeated = collectives(body, placed.placement, 2, 8, repeated=("n0", "n1", "n2", "n3"))
    gathers = [c.count for c in repeated if c.kind == "all_gather"]
    assert sum(c.count for c in repeated) == sum(c.count for c in plain) + 1 and gathers == [2]


def test_the_verifier_names_an_illegal_conversion() -> None:
    body = dense.layer()
    placed = place_body(body, 2, {}, {}, dense.DensePricing(2), rules=dense.table)
    assert placed is not None
    wrong = BodyPlacement(**{
        **{name: getattr(placed.placement, name) for name in ("body", "degree", "inputs", "parameters", "nodes")},
        "outputs": (shard(0),),
    })
    with pytest.raises(InternalError, match="legal conversion"):
        verify(body, wrong, rules=dense.table)
