"""The ILP finds the optimum: against exhaustive enumeration, and with and without reductions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.body import Body
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, OpStrategy, Placement, shard
from planner.placement import place_body
from planner.placement.verify import verify
from tests.oracles.exhaustive_placement import cheapest_seconds
from tests.placement.bodies import TablePricing, body, node

DEGREE = 2
READS = (REPLICATE, SHARED, shard(0), shard(1))
WRITES = (*READS, PARTIAL)
STEPS = ("identity", "slice", "pad", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
STATES = ("replicate", "shared", "shard", "partial")


Case = tuple[Body, dict[str, tuple[OpStrategy, ...]], TablePricing, dict[str, Placement]]


@st.composite
def random_bodies(draw: st.DrawFn) -> Case:
    """A body of three to six nodes, a table of one to three strategies for each, prices, and a boundary."""
    parameters = [f"w{at}" for at in range(draw(st.integers(0, 2)))]
    values = ["x", *parameters]
    nodes, table = [], {}
    for at in range(draw(st.integers(3, 6))):
        operands = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
        name = f"n{at}"
        nodes.append(node(name, *operands))
        values.append(name)
        table[name] = tuple(
            OpStrategy(f"s{k}", tuple(draw(st.sampled_from(READS)) for _ in operands), (draw(st.sampled_from(WRITES)),))
            for k in range(draw(st.integers(1, 3)))
        )
    outputs = draw(st.lists(st.sampled_from([n.name for n in nodes]), min_size=1, max_size=2, unique=True))
    price = st.integers(0, 40).map(lambda thousandths: thousandths / 1000)
    pricing = TablePricing(
        {(name, strategy.name): draw(price) for name, choices in table.items() for strategy in choices},
        {(s + t, step): draw(price) for s in STATES for t in STATES for step in STEPS if draw(st.booleans())},
        draw(price),
    )
    boundary = {name: draw(st.sampled_from((REPLICATE, shard(0), shard(1)))) for name in ("x", *outputs)}
    return body(nodes, ["x"], parameters, outputs), table, pricing, boundary


@pytest.mark.slow
@given(random_bodies())
@settings(max_examples=120, deadline=None)
def test_the_ilp_finds_what_enumeration_finds(case: Case) -> None:
    small, table, pricing, boundary = case
    best = cheapest_seconds(small, DEGREE, table, boundary, pricing)
    reduced, plain = (
        place_body(small, DEGREE, boundary, {}, pricing, rules=lambda *_: table, contracted=contracted)
        for contracted in (True, False)
    )
    assert reduced == plain, "reductions must not change the answer"
    if reduced is None:
        assert best == math.inf, "the ILP calls a body infeasible that enumeration can place"
        return
    verify(small, reduced.placement, rules=lambda *_: table)
    assert reduced.seconds == pytest.approx(best, rel=2e-6, abs=1e-9)
