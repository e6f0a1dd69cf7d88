"""Every bound of a chain against every plan there is: none excludes the best plan, and the exact program meets it.

The plans are enumerated block by block (tests/oracles/exhaustive_plan.py) without streams, tables or counts; only the evaluator
is shared. Bounds are asked with a target just above the best plan, where they cut most.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hardware_profiles import Engine
from planner.constraints_text import parse_pins
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph, Recompute
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.ir.plan import SPLIT_BACKWARD, Batch, BlockDecision, Mesh, Plan, Prediction, Schedule, ScheduleName
from planner.search import Request, search
from planner.search import branches as branches_module
from planner.search import choices as choices_module
from planner.search import counts as counts_module
from planner.search.allowed import Allowed
from planner.search.branches import Branches, Found, Opened
from planner.search.candidates import Candidate
from planner.search.chain import Chain
from planner.search.choices import Choices, choices_of
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.effort import Effort
from planner.search.engine import planning_engine
from planner.search.layings import Layings, layings_of
from planner.search.linear import Floats, Row
from planner.search.mixtures import Mixture
from planner.search.patterns import Patterns
from planner.search.rows import Layout
from planner.search.shape import Shape
from planner.search.solve import Fingerprints, Task, certain_tied_seconds
from planner.search.splits import Split, Splits
from planner.search.stream import stream_of
from planner.search.works import works
from tests.oracles.exhaustive_plan import best_plan, every_plan
from tests.search.made import make_cluster, make_costed, make_graph
from tests.wide import wide

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 1, 1, 4), ("1f1b", 2, 1, 4), ("gpipe", 2, 1, 3), ("1f1b", 3, 1, 6), ("gpipe", 3, 1, 4), ("zbv", 2, 2, 5),
    ("interleaved-1f1b", 2, 2, 4), ("interleaved-zero-bubble", 2, 1, 4), ("interleaved-zero-bubble", 3, 1, 6),
    ("interleaved-zero-bubble", 2, 2, 4), ("interleaved-1f1b", 2, 2, 2), ("interleaved-1f1b", 2, 2, 3), ("zbv", 2, 2, 3),
    ("interleaved-zero-bubble", 2, 2, 2),
]
"""With one round of micro-batches, gradients of a rank's first stages come when activations of its last ones are gone."""
CHAINS = ["eaaah", "eaah", "aabb", "eaabh", "abab", "aaaa", "eabbh"]
SLACK = 1e-6
ENGINES = [
    planning_engine(), Engine(gathers_hidden=0.6, gathers_floor=0.2, gradients_hidden=0.1, gradients_floor=0.3),
    Engine(gathers_hidden=1.0, gathers_floor=0.0, sends_exposed=0.7, sends_blocking=0.5),
]
"""The bounds hold for an engine that hides traffic behind compute as well."""
UNEVEN = [(1,), (1,), (1, 1, 3), (1,), (1,), (4, 1)]
"""How much crosses the cuts, one after the other and in turn."""
PARTS = pytest.mark.parametrize("part", [3, wide(1)])
"""One case of so many is looked at, and as large a part of what is found in all of them must be."""


@dataclass(frozen=True)
class Case:
    """One random instance. ``tight``: memory as a part of what the plan of most memory needs."""

    schedule: ScheduleName
    pipeline: int
    virtual: int
    microbatches: int
    data: int
    blocks: str
    tied: bool
    zeros: tuple[int, ...]
    levels: tuple[Recompute, ...]
    crossing: int
    memory: int
    seed: int
    engine: Engine

    @property
    def choices(self) -> tuple[BlockDecision, ...]:
        return tuple(BlockDecision(zero, level) for zero in self.zeros for level in self.levels)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Bytes that cross the cuts, in turn."""
        return tuple(self.crossing * factor for factor in UNEVEN[self.seed % len(UNEVEN)])

    @property
    def plans(self) -> int:
        return math.comb(len(self.blocks) - 1, self.pipeline * self.virtual - 1) * len(self.choices) ** len(self.blocks)


def drawn(draw: Random) -> Case:
    schedule, pipeline, virtual, microbatches = draw.choice(SHAPES)
    blocks = draw.choice([c for c in CHAINS if len(c) >= pipeline * virtual])
    split = schedule in SPLIT_BACKWARD
    data = draw.choice([1, 2, 2])
    stages = [0, 1, 2] if split else [0, 1, 2, 3]
    zeros = (0,) if data == 1 else tuple(sorted(draw.sample(stages, draw.randint(1, 3))))
    levels: tuple[Recompute, ...] = ("none",)
    if not split:
        levels = draw.choice([("none",), ("none", "full"), ("none", "selective"), ("none", "selective", "full")])
    while len(zeros) * len(levels) > (4 if len(blocks) == 4 else 3):
        zeros, levels = (zeros[:-1], levels) if len(zeros) > 1 else (zeros, levels[:-1])
    return Case(
        schedule, pipeline, virtual, microbatches, data, blocks, blocks[0] == "e" and draw.random() < 0.5, zeros, levels,
        draw.choice([0, 4, 400, 40_000_000]), draw.randint(120, 1500), draw.randint(0, 10_000), draw.choice(ENGINES),
    )


CASES = st.builds(drawn, st.randoms(use_true_random=False))


def _check_each(seed: int, number: int, *given: Case) -> None:
    """The given ones, and so many that are the same whatever else is loaded (numbers in any module are drawn by Hypothesis)."""
    draw = Random(seed)
    for case in (*given, *(drawn(draw) for _ in range(number))):
        try:
            _check(case)
        except AssertionError as error:
            error.add_note(f"of {case}")
            raise


def _problem(case: Case) -> tuple[ModelGraph, CostedGraph, Plan]:
    graph = make_graph(list(case.blocks), tied=case.tied)
    costed = make_costed(graph, case.seed, zeros=case.zeros, levels=case.levels, crossing=case.cuts)
    total = case.microbatches * case.data
    template = Plan(
        "made", "", "made", "", "fp32", 4, Mesh(pipeline=case.pipeline, data=case.data), Batch(total, 1, case.microbatches),
        Schedule(case.schedule, case.virtual), case.data, (), costed.placements[0],
    )
    return graph, costed, template


def _memory(case: Case) -> int:
    """Transfers of many bytes need room for their buffers."""
    most = max(case.cuts)
    return case.memory + (most if most > 4000 else most // 4) * 2 * case.microbatches * case.virtual


def _check_bounds(case: Case, costed: CostedGraph, best: Prediction | None) -> None:
    """Each look at the chains of the case, the target just above the best plan."""
    cluster = make_cluster(case.pipeline * case.data, _memory(case))
    mesh = Mesh(pipeline=case.pipeline, data=case.data)
    candidate = Candidate(mesh, 1, case.microbatches, case.schedule, case.virtual, ((case.data,),))
    shape = Shape(case.schedule, case.pipeline, case.virtual, case.microbatches, _memory(case))
    target = math.inf if best is None else best.step_s * (1 + SLACK)
    met = math.inf
    for zero in case.zeros if case.tied else (None,):
        fixed = () if zero is None else (("e", zero), ("h", zero))
        chain = Chain((costed,), 0, Allowed(case.levels, case.zeros, fixed), (case.data,))
        stream = stream_of((chain,), candidate.mesh, cluster, case.engine)
        assert stream is not None
        request = Request(case.microbatches * case.data, 4, "fp32")
        tied_s = certain_tied_seconds(Task(candidate, chain, cluster, request, Fingerprints("", "", "", "")))
        ranks = Ranks(stream, shape, works(stream, case.microbatches))
        effort = Effort(target - tied_s, time.perf_counter() + 60, gap=1e-7)
        relaxed, exact = Counts(ranks, {}), Counts(ranks, {}, exact=True)
        relaxed.solve(effort, whole=False)
        bounds = [ranks.work_s, ranks.costs.bound, ranks.sharper(target - tied_s).bound, relaxed.bound]
        branches = Branches(relaxed)
        assert not branches.solve(effort, lambda counts, target_s=effort.target_s: target_s)
        exact.solve(effort, whole=True)
        # Where cuts differ, only leaves know which they have.
        met = min(met, max(exact.bound, branches.bound) + tied_s)
        for bound in (*bounds, *([] if len(set(case.cuts)) > 1 else [branches.bound])):
            assert bound <= exact.bound * (1 + 1e-4) or exact.bound >= effort.target_s * (1 - 1e-9)
        assert branches.bound >= min(exact.bound, effort.target_s) * (1 - 3e-4), "branches leave something out"
    if best is not None:
        assert met <= best.step_s * (1 + 2 * SLACK), "the bound excludes a real plan"
        assert met >= best.step_s * (1 - 3e-4), "the exact program is not exact"
    else:
        assert math.isinf(met), "nothing fits, but the program has a solution"


def _check_search(case: Case, graph: ModelGraph, costed: CostedGraph, best: Prediction | None) -> None:
    cluster = make_cluster(case.pipeline * case.data, _memory(case))
    pins = parse_pins([
        f"pipeline={case.pipeline}", f"data={case.data}", "tensor=1", f"schedule={case.schedule}", f"virtual={case.virtual}",
        "microbatch=1", f"zero_group={case.data}",
    ])
    request = Request(case.microbatches * case.data, 4, "fp32", pins, gap=1e-4)
    try:
        result = search(graph, cluster, request, costing=lambda _: costed)
    except NoPlanFits:
        assert best is None
        return
    assert best is not None
    assert result.prediction.fits
    assert result.lower_bound_s <= best.step_s * (1 + SLACK), "the bound excludes a real plan"
    assert result.prediction.step_s * (1 - result.optimality_gap) <= best.step_s * (1 + SLACK)
    assert result.optimality_gap <= 1e-3, f"gap {result.optimality_gap}"


WHOLE_BY_CHANCE = Case(
    "interleaved-zero-bubble", 2, 2, 4, 2, "eabbh", True, (0, 1, 2), ("none",), 40_000_000, 120, 120, planning_engine(),
)
"""Real variables give whole numbers of blocks, whose best choices are worse than those of other numbers."""
FULL_AT_ANOTHER_INSTANT = Case(
    "interleaved-1f1b", 2, 2, 3, 2, "abab", False, (1,), ("none", "full"), 4, 284, 1, planning_engine(),
)
"""Just one plan fits, as a rank holds most of its blocks' bytes while it keeps little for its neighbours."""


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example(case=WHOLE_BY_CHANCE)
@given(case=CASES)
def test_no_bound_excludes_the_best_plan(case: Case) -> None:
    _check(case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=CASES, at=st.integers(0, 10_000))
def test_the_memory_of_just_one_plan_excludes_no_other(case: Case, at: int) -> None:
    _check_just_fitting(case, at)


def _check_just_fitting(case: Case, at: int) -> None:
    """Leave just as much memory as one of the plans needs: a byte too many in a bound, and plans are missing."""
    if case.plans > 2500:
        return
    _, costed, template = _problem(case)
    roomy = make_cluster(case.pipeline * case.data, 10**12)
    plans = every_plan(template, costed, case.choices)
    peaks = sorted({evaluate(plan, costed, roomy, case.engine).peak_memory_bytes for plan in plans})
    _check(replace(case, memory=case.memory + peaks[at % len(peaks)] - _memory(case)))


def _check(case: Case) -> None:
    if case.plans > 2500:
        return
    graph, costed, template = _problem(case)
    cluster = make_cluster(case.pipeline * case.data, _memory(case))
    found = best_plan(template, costed, cluster, case.choices, tied=case.tied, engine=case.engine)
    best = None if found is None else found[1]
    _check_bounds(case, costed, best)
    if case.engine == planning_engine():
        _check_search(case, graph, costed, best)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("factors", [(1, 2, 4), (4, 1), (1, 4, 1)])
@pytest.mark.parametrize("engine", ENGINES[::2], ids=["waits", "stops"])
@pytest.mark.parametrize(("schedule", "pipeline", "virtual", "microbatches"), [
    ("1f1b", 3, 1, 6), ("gpipe", 4, 1, 4), ("interleaved-1f1b", 2, 2, 4), ("interleaved-zero-bubble", 2, 2, 2),
    ("zbv", 2, 2, 5),
])
def test_what_crosses_a_cut_is_known_where_its_place_is(
    schedule: ScheduleName, pipeline: int, virtual: int, microbatches: int, engine: Engine, factors: tuple[int, ...],
    apart: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages have a block or two, and transfers take a good part of a step: the bound of the least of them is far below."""
    monkeypatch.setitem(globals(), "UNEVEN", [factors])
    if not apart:
        monkeypatch.setattr(branches_module, "choices_of", lambda *given: None)
    _check(Case(
        schedule, pipeline, virtual, microbatches, 1, "eabh", False, (0,), ("none",), 400_000_000, 10**12, 7, engine,
    ))


@pytest.mark.slow
def test_parted_branches_leave_no_plan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains as small as these are told apart, or real variables settle them; here every branch is mixed and parted, as
    those of long chains are."""
    told: list[int] = []
    splits: list[Split] = []
    widened: list[bool] = []
    best_mixture, best_split, widen = counts_module.best_mixture, Splits.best, Counts.widen

    def mixing(layout: Layout, *given: Any) -> Mixture | None:
        told.append(given[-1])
        return best_mixture(layout, *given)

    def splitting(self: Splits, *given: Any) -> Split | None:
        found = best_split(self, *given)
        splits.extend([found] if found is not None else [])
        return found

    def widening(self: Counts) -> bool:
        widened.append(widen(self))
        return widened[-1]

    monkeypatch.setattr(counts_module, "best_mixture", mixing)
    monkeypatch.setattr(Splits, "best", splitting)
    monkeypatch.setattr(Counts, "widen", widening)
    for module in (counts_module, branches_module):
        monkeypatch.setattr(module, "UNTIL_MIXED", 0)
    monkeypatch.setattr(Branches, "_told_apart", lambda self, bound, effort: False)
    for name in ("layings_of", "choices_of"):  # Whole numbers settle leaves.
        monkeypatch.setattr(branches_module, name, lambda *given: None)
    away = _part_every_other(monkeypatch)
    hold, covered = Counts.hold, list[Row]()

    def holding(self: Counts, whole: Floats) -> None:
        hold(self, whole)
        before = len(self._model().rows)
        self._cover()
        covered.extend(self._model().rows[before:])

    monkeypatch.setattr(Counts, "hold", holding)
    settled = itertools.cycle((True, False))
    monkeypatch.setattr(Counts, "_settled", lambda self, target_s: next(settled))
    # A bound is never above the target: far from it, what is left out shows.
    monkeypatch.setitem(globals(), "SLACK", 0.05)

    _check_each(5001, 240)
    assert {2, 3} <= set(told) and splits and covered and any(widened)
    assert {branch.held is None for branch in away} == {True, False}


@pytest.mark.slow
@PARTS
def test_choices_told_apart_leave_no_plan_out(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Leaves' choices are told apart rank by rank."""
    told: list[Choices] = []

    def telling(*given: Any) -> Choices | None:
        found = choices_of(*given)
        told.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(branches_module, "choices_of", telling)
    # Few cases are left to simulate where paths are known.
    monkeypatch.setattr(choices_module, "MOST_PATHS", 1)
    monkeypatch.setitem(globals(), "SLACK", 0.25)
    away = _part_every_other(monkeypatch)

    _check_each(6174, 320 // part, FULL_AT_ANOTHER_INSTANT)
    ended = [choices for choices in told if not choices.open]
    assert len(ended) > 100 / part and sum(math.isfinite(choices.least_s) for choices in ended) > 30 / part
    assert sum(choices.simulated > 10 for choices in ended) > 10 / part
    assert away


@pytest.mark.slow
@PARTS
def test_layings_told_apart_leave_no_plan_out(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Numbers of blocks are told apart by what ranks take in all, and not by these numbers alone before."""
    told: list[Layings] = []

    def at_once(self: Branches, bound: float, effort: Effort) -> bool:
        """Instead of numbers of blocks alone."""
        patterns, costs = Patterns(self.counts.ranks), self.counts.costs
        if self._looked_apart or not patterns.possible or costs is None or not math.isfinite(effort.target_s):
            return False
        self._looked_apart = True
        layings = layings_of(patterns, costs, self.counts.paths, effort.target_s)
        if layings is None:
            return False
        told.append(layings)
        _, done = layings.go(effort.target_s, lambda: False, lambda found: math.inf)
        found = list(map(np.array, sorted(layings.found)))
        return done and self._lay_out(patterns, found, np.full(len(found), bound), effort)

    monkeypatch.setattr(Branches, "_told_apart", at_once)
    monkeypatch.setattr(branches_module, "SHORT", 0)
    monkeypatch.setattr(choices_module, "MOST_PATHS", 1)
    # Cuts that differ leave no long run.
    monkeypatch.setitem(globals(), "UNEVEN", [(1,)])
    monkeypatch.setitem(globals(), "SLACK", 0.25)
    away = _part_every_other(monkeypatch)

    _check_each(2357, 400 // part)
    ended = [layings for layings in told if not layings.open]
    assert len(ended) > 60 / part and sum(len(layings.found) > 1 for layings in ended) > 15 / part
    assert sum(not layings.found for layings in ended) > 10 / part
    assert away


def _part_every_other(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    """From now on every other search through branches gives some of them away, to one that knows nothing else. Those."""
    away: list[Opened] = []
    solve, parted = Branches.solve, itertools.cycle((True, False))

    def solving(self: Branches, effort: Effort, found: Found) -> bool:
        if not next(parted):
            return solve(self, effort, found)
        for milliseconds in range(2, 1000, 2):
            unfinished = solve(self, replace(effort, deadline=time.perf_counter() + milliseconds / 1000), found)
            part = pickle.loads(pickle.dumps(self.part(effort.target_s)))
            if part:
                counts = Counts(self.counts.ranks, {})
                other = Branches(counts, part)
                # The effort's own deadline is a turn of the search, and may have passed: its end is no matter of time here.
                assert not solve(other, replace(effort, deadline=time.perf_counter() + 60), found)
                self.finished_s = min(self.finished_s, other.bound)
                away.extend(part)
            if not unfinished:
                return False
        raise AssertionError("no end")

    monkeypatch.setattr(Branches, "solve", solving)
    return away
