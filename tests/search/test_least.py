"""The plan of least memory against every plan there is: exact where it says so, and its bound below them all."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.constraints_text import parse_constraints
from planner.evaluate import evaluate
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName
from planner.search import Request
from planner.search.candidates import enumerate_candidates
from planner.search.least import LeastMemory
from planner.search.solve import Fingerprints
from tests.oracles.exhaustive_plan import every_plan
from tests.search.made import make_cluster, make_costed, make_graph

NAMES = Fingerprints("made", "", "made", "")
CASES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 1, 1, 2), ("1f1b", 2, 1, 2), ("gpipe", 3, 1, 1), ("1f1b", 4, 1, 1), ("interleaved-1f1b", 2, 2, 1),
    ("interleaved-zero-bubble", 2, 2, 1), ("zbv", 2, 2, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pipeline", "virtual", "data"), CASES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(chain=st.text("ab", min_size=4, max_size=5).map(lambda s: "e" + s[1:]), seed=st.integers(0, 10_000))
def test_no_plan_needs_less(schedule: ScheduleName, pipeline: int, virtual: int, data: int, chain: str, seed: int) -> None:
    chain = chain[:4] if data > 1 else chain  # Every plan of six choices a block is evaluated.
    graph, cluster = make_graph(list(chain)), make_cluster(pipeline * data, 10_000)
    split = schedule in ("interleaved-zero-bubble", "zbv")
    zeros = (0,) if data == 1 else (0, 2) if split else (0, 3) if pipeline > 1 else (0, 1, 3)
    costed = make_costed(graph, seed, zeros=zeros, crossing=seed % 4 * 5)
    choices = tuple(BlockDecision(zero, level) for zero in zeros for level in (("none",) if split else ("none", "full")))
    pins = parse_constraints([f"pipeline={pipeline}", f"schedule={schedule}", "tensor=1", f"virtual={virtual}", "microbatch=1"])
    request = Request(4 * data, 4, "fp32", pins)
    candidates = enumerate_candidates(graph, cluster, request)
    assert len(candidates) == 1
    template = Plan("made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline, data=data), Batch(4 * data, 1, 4),
                    Schedule(schedule, virtual), data, (), costed.placements[0])
    expected = min(evaluate(plan, costed, cluster).peak_memory_bytes for plan in every_plan(template, costed, choices))
    least = LeastMemory(graph, candidates, lambda _: costed, cluster, request, NAMES, time.perf_counter() + 120).run()
    assert least is not None
    assert evaluate(least.plan, costed, cluster).peak_memory_bytes == least.peak_bytes == expected
    assert expected - 1 <= least.bound_bytes <= expected
