"""What a search says that nothing is quicker than, whatever it leaves undone."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

from planner.search import Request, parse_pins
from tests.search.made import Always, make_cluster, make_costed, make_graph

searching: Any = importlib.import_module("planner.search.search")  # The package has a function of that name.
GRAPH = make_graph("abbbbbbbbc")


@pytest.mark.parametrize(("seed", "memory"), [(0, 500), (3, 500), (4, 500), (5, 500), (1, 2000), (4, 2000), (5, 2000)])
def test_a_candidate_that_a_wide_gap_passes_over_counts(seed: int, memory: int) -> None:
    """What is not quicker than the best plan by the gap is left: it may be quicker by less (in the fourth and the sixth)."""
    costed = make_costed(GRAPH, seed, zeros=(0, 1), levels=("none", "full"), crossing=5)
    pins, cluster = parse_pins(["pipeline=2", "tensor=1", "schedule=1f1b", "microbatch=1"]), make_cluster(4, memory)
    near, wide = (
        searching.search(GRAPH, cluster, Request(8, 4, "fp32", pins, gap=gap), costing=Always(costed))
        for gap in (1e-6, 0.3)
    )
    assert wide.lower_bound_s <= near.prediction.step_s * (1 + 1e-9)
    assert near.optimality_gap <= 1e-6 and wide.optimality_gap <= 0.3, "to the last digit"


@pytest.mark.slow
def test_a_time_limit_holds_where_micro_batches_are_many() -> None:
    """What practice begins with, the smallest micro-batch, is millions of actions there: quicker ones are few.

    The limit is many times what a shared machine needs, so that the answer is not the clock's."""
    limit_s = 600.0
    costed, begin = make_costed(GRAPH, 0, zeros=(0,), levels=("none",), crossing=5), time.perf_counter()
    request = Request(2**20, 4, "fp32", parse_pins(["pipeline=2"]), time_limit_s=limit_s)
    result = searching.search(GRAPH, make_cluster(2, 10**9), request, costing=Always(costed))
    assert time.perf_counter() - begin < 2 * limit_s
    assert result.optimality_gap < 0.05 and result.plan.batch.accumulation < 100


def test_schedules_too_long_to_be_simulated_whole_have_plans_and_bounds() -> None:
    """Where constraints leave nothing else."""
    costed = make_costed(GRAPH, 0, zeros=(0,), levels=("none",), crossing=5)
    pins = parse_pins(["pipeline=2", "microbatch=1", "schedule=1f1b"])
    request = Request(2**24, 4, "fp32", pins, time_limit_s=60.0)
    result = searching.search(GRAPH, make_cluster(2, 10**9), request, costing=Always(costed))
    assert result.plan.batch.accumulation == 2**24 and 0 < result.lower_bound_s <= result.prediction.step_s
