"""Programs of the tests' small models, and both sides of their ledgers."""

from __future__ import annotations

from pathlib import Path

from codegen import emit
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, StageMemory
from planner.ledger import Call, Difference, RankLedger, compare, predict_rank
from tests.matrix.build import Row, make_plan
from tests.matrix.programs import small_graph

NO_MEMORY = StageMemory(0, 0, 0, 0, 0, 0)


def written(model: str, row: Row, directory: Path, *, precision: str = "fp64", layers: int = 2) -> tuple[Plan, ModelGraph]:
    """A plan of a small model; its program is written into a directory."""
    graph = small_graph(model, precision, layers)
    plan = make_plan(graph, row, precision=precision)
    emit(plan, graph, directory, prediction=None, plan_yaml="format: 1\n")
    return plan, graph


def parted_calls(plan: Plan, graph: ModelGraph, rehearsed: RankLedger) -> list[Difference]:
    """The calls in which the plan's prediction parts from a rank's rehearsal."""
    predicted = predict_rank(plan, graph, rehearsed.rank, NO_MEMORY)
    return [difference for difference in compare(predicted, rehearsed) if isinstance(difference.what, Call)]
