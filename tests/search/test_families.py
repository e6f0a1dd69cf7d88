"""Sketches of a family, counted at once, are bounded as each is alone; and what is known of them is not found out again."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest

from hardware_profiles import resolve_cluster
from planner.constraints_text import parse_constraints
from planner.search import Request
from planner.search.candidates import Candidate, enumerate_candidates, shape_of
from planner.search.counted import Ranks
from planner.search.families import Bundle, Scope
from planner.search.linear import Floats
from planner.search.nodes import Sketch, count, kin_of
from planner.search.prices import Prices
from planner.search.shape import Shape
from planner.search.together import Together
from planner.search.works import works
from tests.costing.test_measured_memory import graph_of
from tests.search import streams
from tests.wide import wide

pytestmark = pytest.mark.slow

CONSTRAINTS = {
    "none": ((), ()),
    "some": (("blocks.1: zero in [2, 3]",), ("schedule=gpipe, blocks.*: recompute=full",)),
}


@cache
def _priced(name: str) -> tuple[Prices, Mapping[Candidate, float]]:
    """And the bounds of all candidates."""
    graph, cluster = graph_of("gpt", "float32"), resolve_cluster("local-cpu:1x4")
    request = Request(16, graph.sequence, "fp32", parse_constraints(*CONSTRAINTS[name]))
    candidates = enumerate_candidates(graph, cluster, request)
    prices = Prices(graph, cluster, request, candidates)
    return prices, {candidate: prices.bound(candidate) for candidate in candidates}


def _scope(name: str) -> tuple[Scope, list[Sketch]]:
    """And all sketches, not counted."""
    prices, bounds = _priced(name)
    sketches = [Sketch(candidate, bound) for candidate, bound in bounds.items() if math.isfinite(bound)]
    return Scope(graph_of("gpt", "float32"), prices, prices.cluster, prices.request, cast(Any, None)), sketches


@pytest.fixture(params=CONSTRAINTS)
def scope_and_sketches(request: pytest.FixtureRequest) -> tuple[Scope, list[Sketch]]:
    return _scope(request.param)


def _again(sketch: Sketch) -> Sketch:
    return Sketch(sketch.candidate, sketch.bound)


def test_kin_is_all_sketches_once_by_bound(scope_and_sketches: tuple[Scope, list[Sketch]]) -> None:
    _, sketches = scope_and_sketches
    found = kin_of(sketches)
    assert Counter(each.candidate for kin in found for each in kin.sketches) == Counter(each.candidate for each in sketches)
    assert [kin.bound for kin in found] == sorted(kin.bound for kin in found)
    assert all(kin.bound == min(sketch.bound for sketch in kin.sketches) for kin in found)
    assert 10 < len(found) < len(sketches) / 2


@pytest.mark.parametrize("part", [wide(0.25), 0.5, 1.0])
def test_at_once_as_alone(scope_and_sketches: tuple[Scope, list[Sketch]], part: float) -> None:
    """Targets that some of a family are below and some are not."""
    scope, sketches = scope_and_sketches
    quickest = [_again(sketch) for sketch in sketches]
    count(quickest, scope)
    bounds = sorted(sketch.bound for sketch in quickest if math.isfinite(sketch.bound))
    target_s = 2 * bounds[-1] if part == 1.0 else bounds[int(part * len(bounds))]
    for kin in kin_of(_again(sketch) for sketch in sketches):
        alone = [_again(sketch) for sketch in kin.sketches]
        kin.count(scope, target_s)
        for together, single in zip(kin.sketches, alone, strict=True):
            if single.bound < target_s:
                count([single], scope, target_s)
            _check_same(together, single, scope, target_s)


def _check_same(together: Sketch, single: Sketch, scope: Scope, target_s: float) -> None:
    assert together.bound == single.bound and together.counted_s == single.counted_s
    for one, other in zip(together.chains, single.chains, strict=True):
        assert one.bundle is other.bundle and one.bound == other.bound
        assert (one.ranks is None) == (other.ranks is None) == (one.bound >= target_s)
        if one.ranks is None:
            continue
        ranks = Ranks(one.bundle.stream, shape_of(together.candidate, scope.cluster), one.bundle.works)
        assert one.bound == max(ranks.work_s, ranks.costs.bound)
        for mine, its in zip(one.ranks.costs.seconds, ranks.costs.seconds, strict=True):
            np.testing.assert_array_equal(mine, its)
        np.testing.assert_array_equal(one.ranks.costs.before_s, ranks.costs.before_s)
        np.testing.assert_array_equal(one.ranks.costs.idle_s, ranks.costs.idle_s)


def test_few_blocks_of_a_rank_say_what_all_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is tight some ranks have few blocks, and the others more than twice their share."""
    shapes = tuple(
        Shape(schedule, 8, virtual, 8, 0.0)
        for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3))
    )
    looked: list[int] = []
    table = Together._table

    def noted(self: Together, run: int, columns: int) -> Floats:
        looked.append(columns)
        return table(self, run, columns)

    monkeypatch.setattr(Together, "_table", noted)
    bounds, enough = list[float](), list[bool]()
    for seed, memory_bytes in itertools.product(range(4), (16.0, 18.0, 20.0, 25.0, 30.0, 40.0, 60.0, 200.0)):
        drawn = streams.draw(seed, 32)
        stream = replace(drawn, runs=tuple(replace(run, crossing_bytes=0) for run in drawn.runs))
        mine = tuple(replace(shape, capacity_bytes=memory_bytes) for shape in shapes)
        looked.clear()
        together = Together(stream, mine, works(stream, 8))
        found = together.bounds(math.inf).tolist()
        ends = [1, 1] if any(map(math.isfinite, found)) else []
        assert looked in ([8, *ends], [8, 30, *ends])
        enough.append(30 not in looked)
        assert found == [Ranks(stream, shape, together.known).costs.bound for shape in mine]
        bounds += found
    assert {True, False} == set(enough) == set(map(math.isfinite, bounds))


def test_what_cannot_matter_is_not_counted(scope_and_sketches: tuple[Scope, list[Sketch]]) -> None:
    scope, sketches = scope_and_sketches
    ordered = sorted(sketch.bound for sketch in sketches)
    target_s = ordered[len(ordered) // 2]
    left = 0
    for kin in kin_of(_again(sketch) for sketch in sketches):
        before: dict[Candidate, float] = {sketch.candidate: sketch.bound for sketch in kin.sketches}
        kin.count(scope, target_s)
        for sketch in kin.sketches:
            assert sketch.bound >= before[sketch.candidate]
            if before[sketch.candidate] >= target_s:
                left += 1
                assert not sketch.chains and sketch.bound == before[sketch.candidate]
    assert left


def test_attempts_know_what_counting_knew(
    scope_and_sketches: tuple[Scope, list[Sketch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same target and at lower ones; at a higher one they are counted again."""
    scope, sketches = scope_and_sketches
    begun = [_again(sketch) for sketch in sketches]
    count(begun, scope)
    bounds = sorted(sketch.bound for sketch in begun if math.isfinite(sketch.bound))
    target_s, lower_s = bounds[len(bounds) // 2], bounds[len(bounds) // 4]
    kin = kin_of(_again(sketch) for sketch in sketches)
    for each in kin:
        each.count(scope, target_s)
    promising = [sketch for each in kin for sketch in each.sketches if sketch.bound < lower_s]
    assert promising

    def again(*_: Any) -> None:
        raise AssertionError("counted again")

    monkeypatch.setattr(Bundle, "counted", again)
    for sketch in promising:
        for goal_s in (target_s, lower_s):
            attempts, others_s = sketch.attempts(scope, goal_s)
            assert attempts and all(attempt.counts.bound < goal_s for attempt in attempts) and others_s >= goal_s
    with pytest.raises(AssertionError, match="counted again"):
        promising[0].attempts(scope, target_s * 2)
