"""What is counted before chains are priced is below what is counted with them, for every candidate, and says most of it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cost_models.live import LIVE, instants
from cost_models.schedules import SCHEDULES, legal
from hardware_profiles import Cluster, resolve_cluster
from planner.constraints_text import parse_constraints
from planner.evaluate import receive_buffers
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.search import Request
from planner.search.candidates import Candidate, candidates_of
from planner.search.families import Scope
from planner.search.nodes import Kin, Sketch, count, count_roughly
from planner.search.prices import Prices
from planner.search.shape import Shape
from planner.search.solve import Fingerprints
from planner.trace import load_model, trace_model
from tests.costing.test_measured_memory import graph_of
from tests.trace.test_trace import EXAMPLES

ROUNDING = 1 + 1e-9
WIDE = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 51200}
LLAMA = {"layers": 16, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}


def _scope(
    graph: ModelGraph, cluster: Cluster, batch: int, precision: Any, constraints: Any = ((), ())
) -> tuple[Scope, list[Candidate]]:
    """And all candidates."""
    request = Request(batch, graph.sequence, precision, parse_constraints(*constraints))
    found = candidates_of(graph, cluster, request)
    prices = Prices(graph, cluster, request, found.kinds)
    every = [prices.without_beaten(candidate) for kind in found.kinds for candidate in kind.candidates]
    return Scope(graph, prices, prices.cluster, request, Fingerprints("", "", "", "")), every


@cache
def _example(name: str) -> ModelGraph:
    settings = WIDE if name == "gpt" else LLAMA
    return trace_model(load_model(f"{EXAMPLES / name}.py:{name}", settings, 2048), sequence=2048, dtype="bfloat16")


def _with_memory(cluster: Cluster, gigabytes: float) -> Cluster:
    return replace(cluster, chip=replace(cluster.chip, memory_bytes=int(gigabytes * 1e9)))


def _both(scope: Scope, candidate: Candidate) -> tuple[Sketch, Sketch]:
    rough, close = Sketch(candidate, 0.0), Sketch(candidate, 0.0)
    count_roughly([rough], scope)
    count([close], scope)
    return rough, close


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_of_a_small_model_it_is_below_what_chains_say(name: str) -> None:
    """Of every candidate, where launches and latencies are most of all seconds."""
    scope, every = _scope(graph_of(name, "float32"), resolve_cluster("local-cpu:2x2"), 16, "fp32")
    for candidate in every:
        rough, close = _both(scope, candidate)
        assert 0 < rough.bound <= close.bound * ROUNDING, candidate
        assert rough.counted_s == -math.inf and not rough.chains


@pytest.mark.slow
def test_it_is_below_plans_where_layers_may_not_choose_alike() -> None:
    """Then chains have more runs, and bounds of these say less than one of all their blocks."""
    graph, cluster = graph_of("gpt", "float32"), resolve_cluster("local-cpu:1x4")
    constraints = ("blocks.1: zero in [2, 3]",), ("schedule=gpipe, blocks.*: recompute=full",)
    scope, every = _scope(graph, cluster, 16, "fp32", constraints)
    planned = 0
    for candidate in every:
        rough, close = _both(scope, candidate)
        steps = list[float]()

        def note(plan: Plan, prediction: Prediction, steps: list[float] = steps) -> Prediction:
            steps.append(prediction.step_s)
            return prediction

        for attempt in close.attempts(scope)[0]:
            attempt.probe(note, math.inf)
        assert rough.bound <= min(steps, default=math.inf), candidate
        planned += bool(steps)
    assert planned > 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster", "memory_gb"), [("gpt", "dgx-a100-80gb:2", 24), ("llama", "dgx-h100:2", 60)])
def test_of_a_large_model_it_says_most_of_it(name: str, cluster: str, memory_gb: float) -> None:
    """Of some candidates, in tight memory: of most of those that are no match for the best of them it is known, of more than by
    the closed form."""
    scope, every = _scope(_example(name), _with_memory(resolve_cluster(cluster), memory_gb), 64, "bf16")
    assert isinstance(scope.prices, Prices)
    pairs = [(candidate, *_both(scope, candidate)) for candidate in random.Random(name).sample(every, 250)]
    assert all(rough.bound <= close.bound * ROUNDING for _, rough, close in pairs)
    target_s = min(close.bound for _, _, close in pairs)
    closed = sum(scope.prices.bound(candidate) > target_s for candidate, _, _ in pairs)
    known = sum(rough.bound > target_s for _, rough, _ in pairs)
    assert closed < known > 0.75 * sum(close.bound > target_s for _, _, close in pairs)


@pytest.mark.slow
def test_what_it_says_is_enough_where_it_passes_the_target() -> None:
    """Then chains are not priced; and what is known of a sketch is that none of its chains may be quicker."""
    scope, every = _scope(graph_of("gpt", "float32"), resolve_cluster("local-cpu:2x2"), 16, "fp32")
    sketch, _ = max((_both(scope, candidate) for candidate in every), key=lambda pair: pair[0].bound)
    target_s = 0.9 * sketch.bound
    scope.families.clear()
    again = Sketch(sketch.candidate, 0.0)
    Kin((again,)).count(scope, target_s)
    assert not scope.families and again.bound == pytest.approx(sketch.bound)
    assert again.attempts(scope, target_s) == ([], again.bound)
    attempts, _ = again.attempts(scope, 2 * sketch.bound)
    assert set(scope.families) == {scope.kin(sketch.candidate)} and (attempts or again.bound >= 2 * sketch.bound)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_stages_have_received_lies_in_buffers(schedule: Any) -> None:
    """Whatever it is, so that a bound may leave both out. (A stage that the one before shares its rank with has none; under
    such schedules nothing counts as received.)"""
    looked = 0
    for pipeline, virtual, microbatches in itertools.product(range(1, 7), range(1, 5), range(1, 14)):
        if legal(schedule, pipeline, virtual, microbatches):
            continue
        shape = Shape(schedule, pipeline, virtual, microbatches, 0.0)
        buffers = receive_buffers(*shape.timetable)
        for rank, found in enumerate(instants(*shape.timetable)):
            alive = np.asarray(found)[:, LIVE].max(axis=0)
            for stage, most in zip(shape.owned(rank), alive.tolist(), strict=True):
                if shape.crosses[stage]:
                    assert buffers[stage][0] >= most, (shape, stage)
                    looked += 1
    assert looked
