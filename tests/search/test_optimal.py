"""The solver against every plan there is: never beaten by more than the gap that it prints."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.evaluate import evaluate
from planner.ir.errors import NoPlanFits
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName
from planner.search import Request, parse_pins, search
from tests.oracles.exhaustive_plan import best_plan
from tests.search.made import make_cluster, make_costed, make_graph

pytestmark = pytest.mark.slow

CASES: list[tuple[ScheduleName, int, int]] = [
    ("1f1b", 1, 1), ("1f1b", 2, 1), ("gpipe", 2, 1), ("1f1b", 3, 1), ("gpipe", 3, 1), ("interleaved-1f1b", 2, 2), ("zbv", 2, 2),
]


def _choices(schedule: ScheduleName, zeros: tuple[int, ...]) -> tuple[BlockDecision, ...]:
    split = schedule == "zbv"
    return tuple(
        BlockDecision(zero, level) for zero in zeros for level in ("none", "full")
        if not (split and (zero == 3 or level == "full"))
    )


def _compare(schedule: ScheduleName, pipeline: int, virtual: int, chain: str, memory: int, seed: int, data: int) -> None:
    graph = make_graph(list(chain))
    cluster = make_cluster(pipeline * data, memory)
    zeros = (0, 1, 3) if data > 1 else (0,)
    costed = make_costed(graph, seed, zeros=zeros, crossing=seed % 3 * 4)
    pins = parse_pins([f"pipeline={pipeline}", f"schedule={schedule}", "tensor=1", f"virtual={virtual}", "microbatch=1",
                       f"zero_group={data}"])
    request = Request(4 * data, 4, "fp32", pins, gap=1e-4)
    template = Plan("made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline, data=data), Batch(4 * data, 1, 4),
                    Schedule(schedule, virtual), data, (), costed.placements[0])
    expected = best_plan(template, costed, cluster, _choices(schedule, zeros))
    try:
        result = search(graph, cluster, request, costing=lambda _: costed)
    except NoPlanFits:
        assert expected is None, f"a plan of {expected[1].step_s if expected else 0} s fits"
        return
    assert expected is not None
    best = expected[1].step_s
    assert result.prediction.fits
    assert evaluate(result.plan, costed, cluster) == result.prediction
    assert result.lower_bound_s <= best * (1 + 1e-6), "the bound excludes a real plan"
    assert result.prediction.step_s * (1 - result.optimality_gap) <= best * (1 + 1e-6)
    assert result.optimality_gap <= 2e-3, f"gap {result.optimality_gap}"


@pytest.mark.parametrize(("schedule", "pipeline", "virtual"), CASES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chain=st.text("ab", min_size=4, max_size=6).map(lambda s: "e" + s[1:]),
    memory=st.integers(150, 1500),
    seed=st.integers(0, 10_000),
)
def test_no_plan_beats_the_certificate(
    schedule: ScheduleName, pipeline: int, virtual: int, chain: str, memory: int, seed: int
) -> None:
    _compare(schedule, pipeline, virtual, chain, memory, seed, data=1)


@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(memory=st.integers(200, 900), seed=st.integers(0, 10_000))
def test_mixtures_of_zero_and_recomputation(schedule: ScheduleName, pipeline: int, memory: int, seed: int) -> None:
    _compare(schedule, pipeline, 1, "eaa", memory, seed, data=2)
