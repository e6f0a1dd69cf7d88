"""A narrower job proves nothing wrong: no plan that constraints lead to is quicker than what was proven without them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner.constraints import Combination
from planner.constraints_text import parse_constraints
from planner.distinct import passed_over
from planner.ir.errors import NoPlanFits, PinError
from planner.ir.graph import ModelGraph
from planner.ir.plan import DTYPES, Precision
from planner.search import Request, SearchResult, search
from planner.search.candidates import enumerate_candidates
from tests.costing.test_measured_memory import graph_of
from tests.wide import wide

MODELS = ("gpt", "llama")
CLUSTERS = ("local-cpu:1x4", "local-cpu:4x1", "dgx-h100:2x2", "dgx-a100-80gb:1x6")
LAYERED = ("recompute=none", "recompute=full", "zero=0", "zero=1", "zero=3", "zero>=2", "*.0: zero=1", "*.1: recompute=full")
PINNED = 5
"""Candidates of each job that are asked for one by one."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, *map(wide, (0, 1, 2, 4, 5, 6, 7))])
def test_no_narrower_job_is_quicker_than_what_is_proven(seed: int) -> None:
    draw = random.Random(seed)
    precision: Precision = draw.choice(("fp32", "bf16"))
    graph, cluster = graph_of(MODELS[seed % len(MODELS)], DTYPES[precision]), resolve_cluster(draw.choice(CLUSTERS))
    request = Request(draw.choice((4, 8, 12)), graph.sequence, precision, gap=5e-3)
    free = _found(graph, cluster, request, [])
    assert free is not None
    cluster = _tighter(cluster, free.prediction.peak_memory_bytes, draw.choice((0.3, 0.6, 1.0)))
    free = _found(graph, cluster, request, [])
    least_s = math.inf if free is None else free.lower_bound_s * (1 - 1e-9)  # Where nothing fits, nothing narrower may.
    candidates = [each for candidate in enumerate_candidates(graph, cluster, request) for each in candidate.each]
    for candidate in draw.sample(candidates, min(PINNED, len(candidates))):
        pins = [f"{name}={value}" for name, value in candidate.decided.items() if name not in ("context", "expert")]
        pins += ["zero<=1"] if candidate.once_groups else []  # Other stages are in no job's space that does not name the group.
        for more in ([], [draw.choice(LAYERED)]):
            pinned = _found(graph, cluster, request, [*pins, *more])
            assert pinned is None or pinned.prediction.step_s >= least_s, [*pins, *more]
    other = None if free is None else _found(graph, cluster, request, [], *passed_over(free.plan, cluster, request.constraints))
    assert other is None or other.prediction.step_s >= least_s


def _tighter(cluster: Cluster, peak_bytes: int, part: float) -> Cluster:
    """One that leaves a part of what the quickest plan takes beside the reserve."""
    chip = cluster.chip
    memory_bytes = chip.reserve_bytes + round(part * (peak_bytes - chip.reserve_bytes))
    return replace(cluster, chip=replace(chip, memory_bytes=memory_bytes))


def _found(
    graph: ModelGraph, cluster: Cluster, request: Request, pins: Sequence[str], *passed: Combination
) -> SearchResult | None:
    """What a search finds in its space; None where there is nothing, or constraints contradict each other."""
    try:
        constraints = parse_constraints(pins).with_(*passed)
        return search(graph, cluster, replace(request, constraints=constraints))
    except (NoPlanFits, PinError):
        return None
