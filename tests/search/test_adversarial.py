"""Memory as an adversary: where nothing fits, where exactly one plan fits, and where only the most extreme ones do, the
search finds one or proves that there is none. Judged by every plan there is, enumerated without the planner's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.schedules import legal
from planner.constraints_text import parse_constraints
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.plan import SCHEDULES, Batch, BlockDecision, Mesh, Plan, Schedule
from planner.search import Request, search
from planner.search.refusal import MemoryTooSmall
from tests.oracles.exhaustive_plan import every_plan
from tests.search.made import make_cluster, make_costed, make_graph

BATCH = 4


def all_plans(costed: CostedGraph, devices: int, zeros: tuple[int, ...], virtuals: tuple[int, ...]) -> Iterator[Plan]:
    """Meshes without tensor parallelism, micro-batches, schedules, cuts and decisions."""
    blocks = len(costed.graph.blocks)
    for pipeline in (p for p in range(1, devices + 1) if devices % p == 0 and p <= blocks):
        data = devices // pipeline
        for micro in (m for m in range(1, BATCH + 1) if BATCH % (data * m) == 0):
            for schedule in SCHEDULES if pipeline > 1 else SCHEDULES[1:2]:
                for virtual in virtuals:
                    if virtual * pipeline > blocks or legal(schedule, pipeline, virtual, BATCH // data // micro):
                        continue
                    split = schedule in ("zbv", "interleaved-zero-bubble")
                    choices = tuple(
                        BlockDecision(zero, level) for zero in zeros for level in ("none", "full")
                        if not (split and (zero == 3 or level == "full"))
                    )
                    template = Plan(
                        "made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline, data=data),
                        Batch(BATCH, micro, BATCH // data // micro), Schedule(schedule, virtual), data, (),
                        costed.placements[0],
                    )
                    yield from every_plan(template, costed, choices)


def check(devices: int, chain: str, seed: int, rank: int, zeros: tuple[int, ...], virtuals: tuple[int, ...]) -> None:
    """Leave just as much memory as the plan of the given rank by peak needs (-1: a byte less than the least needs)."""
    graph = make_graph(list(chain))
    costed = make_costed(graph, seed, zeros=zeros, crossing=seed % 3 * 6)
    roomy = make_cluster(devices, 10**6)
    known = [(evaluate(plan, costed, roomy), plan) for plan in all_plans(costed, devices, zeros, virtuals)]
    peaks = sorted({prediction.peak_memory_bytes for prediction, _ in known})
    memory = peaks[0] - 1 if rank < 0 else peaks[min(rank, len(peaks) - 1)]
    best_s = min((p.step_s for p, _ in known if p.peak_memory_bytes <= memory), default=None)
    pins = parse_constraints(["tensor=1", f"virtual in [{','.join(map(str, virtuals))}]", f"zero_group in [1,{devices}]"])
    request = Request(BATCH, 4, "fp32", pins, gap=1e-4)
    cluster = make_cluster(devices, memory)
    if best_s is None:
        with pytest.raises(MemoryTooSmall, match="proven") as refused:
            search(graph, cluster, request, costing=lambda _: costed)
        least = refused.value.least
        assert least is not None
        assert least.peak_bytes == peaks[0], "the plan of least memory"
        assert peaks[0] - 1 <= least.bound_bytes <= peaks[0]
        return
    result = search(graph, cluster, request, costing=lambda _: costed)
    assert result.prediction.peak_memory_bytes <= memory
    assert evaluate(result.plan, costed, cluster) == result.prediction
    assert result.lower_bound_s <= best_s * (1 + 1e-6), "the bound excludes a real plan"
    assert result.prediction.step_s * (1 - result.optimality_gap) <= best_s * (1 + 1e-6)


CHAINS = st.text("ab", min_size=3, max_size=4).map(lambda s: "e" + s[1:])


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True)
@given(devices=st.sampled_from([1, 2, 3]), chain=CHAINS, seed=st.integers(0, 10_000), rank=st.sampled_from([-1, 0, 1, 3]))
def test_the_last_plan_that_fits_is_found(devices: int, chain: str, seed: int, rank: int) -> None:
    check(devices, chain, seed, rank, (0,), (1,))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), rank=st.sampled_from([-1, 0, 1]))
def test_mixed_zero_stages_are_no_hiding_place(seed: int, rank: int) -> None:
    check(2, "eab", seed, rank, (0, 1, 3), (1,))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), rank=st.sampled_from([-1, 0, 1]))
def test_virtual_stages_are_no_hiding_place(seed: int, rank: int) -> None:
    check(2, "eaab", seed, rank, (0,), (1, 2))
