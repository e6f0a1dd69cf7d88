"""The fluid bound against every plan there is: never above the best one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.evaluate import send_seconds
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName
from planner.search.chain import Allowed, Chain
from planner.search.columns import Shape
from planner.search.fluid import Fluid, merged, stream_of
from tests.oracles.exhaustive_plan import best_plan
from tests.search.made import make_cluster, make_costed, make_graph

CASES: list[tuple[ScheduleName, int, int]] = [
    ("1f1b", 2, 1), ("gpipe", 3, 1), ("1f1b", 3, 1), ("interleaved-1f1b", 2, 2), ("interleaved-zero-bubble", 3, 1),
    ("interleaved-zero-bubble", 2, 2), ("zbv", 2, 2),
]


@pytest.mark.parametrize(("schedule", "pipeline", "virtual"), CASES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(memory=st.integers(150, 900), seed=st.integers(0, 10_000))
def test_no_plan_is_quicker_than_the_fluid(
    schedule: ScheduleName, pipeline: int, virtual: int, memory: int, seed: int
) -> None:
    graph = make_graph(list("eaaab"))
    cluster = make_cluster(pipeline, memory)
    costed = make_costed(graph, seed, crossing=seed % 3 * 4)
    split = schedule in ("interleaved-zero-bubble", "zbv")
    levels = ("none",) if split else ("none", "full")
    microbatches = 4 if pipeline == 2 else 6
    mesh = Mesh(pipeline=pipeline)
    template = Plan("made", "", "made", "", "fp32", 4, mesh, Batch(microbatches, 1, microbatches),
                    Schedule(schedule, virtual), 1, (), costed.placements[0])
    best = best_plan(template, costed, cluster, tuple(BlockDecision(0, level) for level in levels))
    chain = Chain(costed, 0, Allowed(levels, (0,)))
    both = merged((chain, chain))
    assert both is not None
    for stream in (stream_of(chain), both):
        shape = Shape(schedule, pipeline, virtual, microbatches, memory)
        bound = Fluid(stream, shape, send_seconds(cluster, mesh, stream.crossing_bytes), {}).solve(math.inf, 6)
        assert best is None or bound <= best[1].step_s * (1 + 1e-7)
