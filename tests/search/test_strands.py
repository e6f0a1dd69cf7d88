"""Gradients that begin in two places: which schedules such a model has, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles import resolve_cluster
from planner.consistency import check_consistency
from planner.constraints_text import parse_constraints
from planner.ir.errors import PinError, PlanFileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import SPLIT_BACKWARD
from planner.search import Request
from planner.search.candidates import enumerate_candidates
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan

MODELS = Path(__file__).parents[1] / "matrix" / "models.py"


def graph_of(model: str) -> ModelGraph:
    return trace_model(load_model(f"{MODELS}:{model}", {}, None), sequence=24, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strands"), [
    ("averages", ("embedding",)), ("translator", ("embedding", "embedding_2")), ("frozen", None), ("odd", None),
])
def test_where_gradients_begin(model: str, strands: tuple[str, ...] | None) -> None:
    found = graph_of(model).strands
    assert found == strands if strands else len(found) == 1


@pytest.mark.slow
def test_a_second_strand_has_no_split_backward_pass() -> None:
    cluster = resolve_cluster("local-cpu:1x4")
    schedules = {
        model: {candidate.schedule for candidate in enumerate_candidates(graph_of(model), cluster, Request(16, 24, "fp32"))}
        for model in ("averages", "translator")
    }
    assert schedules["averages"] - schedules["translator"] == set(SPLIT_BACKWARD)
    request = Request(16, 24, "fp32", parse_constraints(["schedule in [zbv, interleaved-zero-bubble]"]))
    with pytest.raises(PinError, match="gradients of this model begin in two places, embedding and embedding_2; gpipe or 1f1b"):
        enumerate_candidates(graph_of("translator"), cluster, request)


@pytest.mark.slow
def test_a_plan_that_was_edited() -> None:
    graph = graph_of("translator")
    check_consistency(make_plan(graph, Row(pipeline=2, accumulation=4)), graph, "plan.yaml")
    with pytest.raises(PlanFileError, match=r"schedule.name: zbv splits backward passes .* embedding and embedding_2"):
        check_consistency(make_plan(graph, Row(pipeline=2, accumulation=4, schedule="zbv")), graph, "plan.yaml")
