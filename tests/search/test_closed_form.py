"""The cheapest bound of a candidate is below every plan of it, whatever the schedule and however few the micro-batches."""

from __future__ import annotations

import random

import pytest

from cost_models.pipeline import StageTimes, simulate
from cost_models.schedules import SCHEDULES, legal
from hardware_profiles import resolve_cluster
from planner.ir.plan import SPLIT_BACKWARD, ScheduleName
from planner.search import Request, parse_pins, search
from planner.search.candidates import enumerate_candidates
from planner.search.closed_form import Least, closed_form
from planner.search.prices import Prices
from planner.search.shape import Shape
from planner.trace import load_model, trace_model
from tests.trace.test_trace import EXAMPLES

ROUNDING = 1 + 1e-9


def _least(schedule: str, sizes: list[int], passes: tuple[float, float, float]) -> tuple[list[StageTimes], list[Least]]:
    """The stages of so many like blocks each, and what these take at least."""
    forward, inputs, weights = passes
    split = schedule in SPLIT_BACKWARD
    parts = (inputs, weights) if split else (inputs + weights, 0.0)
    stages = [StageTimes(size * forward, size * parts[0], size * parts[1]) for size in sizes]
    way_s = forward + inputs if split else sum(passes)
    return stages, [Least(sum(sizes), sum(passes), way_s, 0.0, 0.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_pipeline_is_quicker(schedule: ScheduleName) -> None:
    draw, fewer = random.Random(schedule), 0
    for _ in range(400):
        pipeline, virtual, microbatches = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 9)
        if legal(schedule, pipeline, virtual, microbatches):
            continue
        sizes = [draw.randint(1, 3) for _ in range(pipeline * virtual)]
        stages, least = _least(schedule, sizes, (draw.random(), draw.random(), draw.random()))
        bound = closed_form(least, 0.0, Shape(schedule, pipeline, virtual, microbatches, 1.0))
        assert bound <= simulate(schedule, pipeline, virtual, microbatches, stages, [0.0] * len(sizes)).total_s * ROUNDING
        fewer += microbatches < pipeline
    assert fewer or schedule not in SPLIT_BACKWARD, "few micro-batches are what weight parts fill"


def test_the_longest_way_is_that_of_one_micro_batch() -> None:
    """One micro-batch alone takes just what the bound says, but for the weight parts that the last rank has left."""
    stages, least = _least("interleaved-zero-bubble", [1] * 4, (1.0, 1.0, 1.0))
    shape = Shape("interleaved-zero-bubble", 4, 1, 1, 1.0)
    assert closed_form(least, 0.0, shape) == 8
    assert simulate("interleaved-zero-bubble", 4, 1, 1, stages, [0.0] * 4).total_s == 9


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [2, 3])
def test_a_priced_bound_is_below_a_found_plan(virtual: int) -> None:
    """Of one micro-batch on four ranks, of wide layers, which kernels and not launches decide."""
    settings = {"layers": 13, "hidden": 8192, "heads": 64}
    graph = trace_model(load_model(f"{EXAMPLES / 'gpt'}.py:gpt", settings, 4096), sequence=4096, dtype="bfloat16")
    cluster, pins = resolve_cluster("dgx-h100:1x4"), ["schedule=interleaved-zero-bubble", "pipeline=4", f"virtual={virtual}"]
    request = Request(1, 4096, "bf16", parse_pins(pins), gap=0.1)
    (candidate,) = enumerate_candidates(graph, cluster, request)
    prices, best = Prices(graph, cluster, request, [candidate]), search(graph, cluster, request)
    assert prices.bound(candidate) <= best.prediction.step_s
