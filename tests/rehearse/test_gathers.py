"""How often ZeRO gathers and reduces: played by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ir.plan import Plan, Schedule
from planner.ledger.calls import Place
from planner.ledger.gathers import play
from planner.ledger.units import Unit
from tests.matrix.build import Row, make_plan
from tests.matrix.programs import small_graph


def plan_of(row: Row) -> Plan:
    return make_plan(small_graph("gpt"), row)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(0, 1, 1), (1, 1, 1), (2, 1, 5), (3, 10, 5)])
def test_one_stage(zero: int, gathers: int, reductions: int) -> None:
    (turns,) = play(plan_of(Row(accumulation=5, data=2)), 0, {0: [Unit((0,), zero, ())]})[0]
    assert (turns.gathers, turns.reductions) == (gathers, reductions)


@pytest.mark.parametrize(("zero", "fetched", "gathers"), [(1, 1, 1), (2, 0, 1), (3, 0, 5), (3, 1, 6)])
def test_what_no_gradient_reaches(zero: int, fetched: int, gathers: int) -> None:
    """Under ZeRO 3 what the next unit begins to gather is there for the next forward pass, and once too often in the last."""
    (turns,) = play(plan_of(Row(accumulation=5, data=2)), 0, {0: [Unit((0,), zero, (), False, bool(fetched))]})[0]
    assert turns.gathers == gathers


def test_a_rank_of_many_stages_gathers_what_zero_asks() -> None:
    """torch's schedules keep three stages of a rank; programs leave it to the blocks."""
    plan = replace(plan_of(Row(pipeline=2, accumulation=4)), schedule=Schedule("interleaved-1f1b", 4))
    for zero, gathers, reductions in ((1, 1, 1), (2, 1, 4), (3, 8, 4)):
        played = play(plan, 0, {stage: [Unit((stage,), zero, ())] for stage in (0, 2, 4, 6)})
        assert all((turns.gathers, turns.reductions) == (gathers, reductions) for (turns,) in played.values())


def test_places_are_the_program_s_rank_order() -> None:
    mesh = plan_of(Row(pipeline=2, data=2, tensor=2)).mesh
    assert [Place.of(rank, mesh).rank(mesh) for rank in range(8)] == list(range(8))
    assert Place.of(5, mesh) == Place(1, 0, 1)
    for order, place in (
        ("data-pipeline-tensor", Place(0, 1, 1)), ("tensor-pipeline-data", Place(0, 1, 1)),
        ("data-tensor-pipeline", Place(1, 1, 0)),
    ):
        other = replace(mesh, order=order)
        assert [Place.of(rank, other).rank(other) for rank in range(8)] == list(range(8))
        assert Place.of(5, other) == place
