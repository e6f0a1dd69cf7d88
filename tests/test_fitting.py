"""A plan is kept only where a closer look at its memory fits too: the search goes on with as much less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.evaluate import evaluate
from planner.ir.errors import NoPlanFits
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Prediction, Schedule, ScheduleName
from planner.search import Request, parse_pins, search
from tests.oracles.exhaustive_plan import best_plan
from tests.search.made import make_cluster, make_costed, make_graph

MORE = 37
"""Bytes that the closer look sees beside the sums."""
CHOICES = tuple(BlockDecision(0, level) for level in ("none", "full"))


def heavier(plan: Plan, prediction: Prediction) -> Prediction:
    return replace(prediction, peak_memory_bytes=prediction.peak_memory_bytes + MORE)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_plan_that_fits_by_a_closer_look_is_found(schedule: ScheduleName, pipeline: int, seed: int) -> None:
    graph = make_graph(list("eaabb"))
    costed = make_costed(graph, seed, crossing=4)
    pins = parse_pins([f"pipeline={pipeline}", f"schedule={schedule}", "tensor=1", "virtual=1", "microbatch=1", "zero_group=1"])
    request = Request(4, 4, "fp32", pins, gap=1e-4)
    template = Plan("made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline), Batch(4, 1, 4), Schedule(schedule, 1), 1, (),
                    costed.placements[0])
    roomy = search(graph, make_cluster(pipeline, 10_000), request, costing=lambda _: costed)
    # By sums the quickest plan fits to the byte; by a closer look it is over.
    limit = roomy.prediction.peak_memory_bytes
    cluster = make_cluster(pipeline, limit)
    unseen = search(graph, cluster, request, costing=lambda _: costed)
    assert unseen.prediction.peak_memory_bytes == limit
    expected = best_plan(template, costed, make_cluster(pipeline, limit - MORE), CHOICES)
    try:
        result = search(graph, cluster, request, costing=lambda _: costed, look=heavier)
    except NoPlanFits:
        assert expected is None
        return
    assert expected is not None
    assert result.prediction.fits
    assert evaluate(result.plan, costed, cluster).peak_memory_bytes == result.prediction.peak_memory_bytes - MORE
    assert result.prediction.step_s == pytest.approx(expected[1].step_s, rel=2e-3)
    assert result.lower_bound_s <= unseen.prediction.step_s * (1 + 1e-9), "the proof is that of the larger space"
