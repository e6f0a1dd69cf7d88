"""Plans whose memory fits by a closer look and not by the sums that the search holds plans to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Prediction, Schedule
from planner.search import Request, beyond, parse_pins, refusal, search
from planner.search.best import Best
from planner.search.beyond import Beyond
from planner.search.candidates import enumerate_candidates
from planner.search.families import Scope
from planner.search.least import Least
from planner.search.refusal import MemoryTooSmall
from planner.search.solve import Fingerprints
from tests.oracles.exhaustive_plan import every_plan
from tests.search.made import Always, make_cluster, make_costed, make_graph
from tests.wide import wide

SHARE = 0.9
"""Of the sums, what the closer look sees."""
CHOICES = tuple(BlockDecision(0, level) for level in ("none", "selective", "full"))
GRAPH = make_graph(list("eaaaaaab"))
PINS = parse_pins(["pipeline=1", "tensor=1", "microbatch=1", "zero_group=1"])
REQUEST = Request(1, 4, "fp32", PINS, gap=1e-4)


def lighter(plan: Plan, prediction: Prediction) -> Prediction:
    return replace(prediction, peak_memory_bytes=round(SHARE * prediction.peak_memory_bytes))


@cache
def every_prediction(seed: int) -> tuple[CostedGraph, Sequence[tuple[Plan, Prediction]]]:
    """Of a cluster whose memory all plans fit in."""
    costed = make_costed(GRAPH, seed, levels=("none", "selective", "full"), crossing=4)
    template = Plan("made", "", "made", "", "fp32", 4, Mesh(), Batch(1, 1, 1), Schedule("1f1b", 1), 1, (), costed.placements[0])
    cluster = make_cluster(1, 10_000)
    return costed, [(plan, evaluate(plan, costed, cluster)) for plan in every_plan(template, costed, CHOICES)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, *map(wide, (1, 3, 4, 5))])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_what_the_sums_leave_out_is_found(seed: int, part: float) -> None:
    """``part``: of the way from the least memory of a plan to that of the quickest, how much there is by the closer look."""
    costed, plans = every_prediction(seed)

    def best(limit: int, choices: tuple[BlockDecision, ...] = CHOICES) -> Prediction | None:
        fitting = [
            prediction for plan, prediction in plans
            if prediction.peak_memory_bytes <= limit and set(plan.stages[0].decisions) <= set(choices)
        ]
        return min(fitting, key=lambda prediction: prediction.step_s, default=None)

    most, least = (found.peak_memory_bytes for choices in (CHOICES, CHOICES[2:]) if (found := best(10_000, choices)))
    limit = round(SHARE * (least + part * (most - least))) + 1
    result = search(GRAPH, make_cluster(1, limit), REQUEST, costing=lambda _: costed, look=lighter)
    assert result.prediction.fits
    assert result.prediction.memory_limit_bytes == limit
    by_sums, by_look = best(limit), best(round(limit / SHARE))
    assert by_look is not None
    assert result.prediction.step_s >= by_look.step_s * (1 - 1e-9)
    assert result.prediction.step_s <= by_look.step_s * 1.05
    assert by_sums is None or result.prediction.step_s < by_sums.step_s
    assert result.lower_bound_s <= result.prediction.step_s


def test_every_mesh_has_a_try_however_long_the_first_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes two seconds; those at the mesh that is tried first are in vain."""
    costed = make_costed(GRAPH, 0, levels=("none", "selective", "full"), crossing=4)
    roomy = search(GRAPH, make_cluster(1, 10_000), REQUEST, costing=lambda _: costed)
    cluster = make_cluster(2, round(SHARE * roomy.prediction.peak_memory_bytes) + 1)
    request = replace(REQUEST, batch=2, constraints=parse_pins(["pipeline=1", "microbatch=1", "zero_group=1"]))
    candidates = enumerate_candidates(GRAPH, cluster, request)
    vain, looks = candidates[0].mesh, list[Plan]()
    assert len({candidate.mesh for candidate in candidates}) == 2

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        looks.append(plan)
        return replace(prediction, peak_memory_bytes=cluster.chip.memory_bytes + (1 if plan.mesh == vain else -1))

    monkeypatch.setattr(beyond, "time", SimpleNamespace(perf_counter=lambda: 2.0 * len(looks)))
    best = Best(request.gap, look)
    scope = Scope(GRAPH, Always(costed), cluster, request, Fingerprints("made", "", "made", ""))
    Beyond(dict.fromkeys(candidates, 0.0), scope, best, lambda: None).go(1e3)
    assert looks[0].mesh == vain
    assert best.found is not None and best.found[0].mesh != vain


def test_without_a_closer_look_the_sums_decide() -> None:
    costed = make_costed(GRAPH, 0, levels=("none", "selective", "full"), crossing=4)
    roomy = search(GRAPH, make_cluster(1, 10_000), REQUEST, costing=lambda _: costed)
    short = make_cluster(1, round(SHARE * roomy.prediction.peak_memory_bytes))
    assert search(GRAPH, short, REQUEST, costing=lambda _: costed).prediction.step_s > roomy.prediction.step_s


@pytest.mark.slow
@pytest.mark.parametrize("pins", [["pipeline=2"], ["pipeline=2", "schedule=interleaved-1f1b"], ["pipeline=1"]])
def test_before_a_refusal_the_thriftiest_are_looked_at(pins: list[str]) -> None:
    """One candidate's plan fits by the closer look alone, and it is not the one of the least sums."""
    costed = make_costed(GRAPH, 3, levels=("none", "selective", "full"), crossing=4)
    request = replace(REQUEST, batch=4, constraints=parse_pins([*pins, "tensor=1", "zero_group=1"]))
    least = least_memory(costed, request)
    limit = least.peak_bytes - 1

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        return lighter(plan, prediction) if plan.batch.micro != least.plan.batch.micro else prediction

    found = search(GRAPH, make_cluster(2, limit), request, costing=lambda _: costed, look=look)
    assert found.prediction.fits and found.prediction.memory_limit_bytes == limit
    assert found.plan.batch.micro != least.plan.batch.micro


def test_the_plan_of_the_least_sums_counts_where_it_alone_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is left for others, and it fits by the closer look."""
    costed = make_costed(GRAPH, 3, levels=("none", "selective", "full"), crossing=4)
    least = least_memory(costed, REQUEST)
    monkeypatch.setattr(refusal, "ALONE_S", -1.0)
    monkeypatch.setattr(Beyond, "go", lambda *_: None)
    found = search(GRAPH, make_cluster(1, least.peak_bytes - 1), REQUEST, costing=lambda _: costed, look=lighter)
    assert found.prediction.fits and found.plan.stages == least.plan.stages


def test_what_is_refused_was_looked_at() -> None:
    costed = make_costed(GRAPH, 3, levels=("none", "selective", "full"), crossing=4)
    least, seen = least_memory(costed, REQUEST), []

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        seen.append(plan)
        return replace(lighter(plan, prediction), peak_memory_bytes=least.peak_bytes)

    said = "proven: by their sums none needs less; of the thriftiest none fits as replayed"
    with pytest.raises(MemoryTooSmall, match=said):
        search(GRAPH, make_cluster(1, least.peak_bytes - 1), REQUEST, costing=lambda _: costed, look=look)
    assert least.plan.stages in [plan.stages for plan in seen]


def test_the_bytes_that_are_missing_are_those_of_the_closer_look() -> None:
    """With so many more the same plan is found; with one less it is not."""
    costed = make_costed(GRAPH, 3, levels=("none", "selective", "full"), crossing=4)
    by_sums = least_memory(costed, REQUEST).peak_bytes
    needed = round(SHARE * by_sums)
    for limit in (needed // 2, needed - 1):
        with pytest.raises(MemoryTooSmall, match=f"{needed - limit} bytes? too few") as refused:
            search(GRAPH, make_cluster(1, limit), REQUEST, costing=lambda _: costed, look=lighter)
        plan, prediction = refused.value.least.thriftiest
        assert (prediction.peak_memory_bytes, refused.value.least.bound_bytes) == (needed, by_sums)
    found = search(GRAPH, make_cluster(1, needed), REQUEST, costing=lambda _: costed, look=lighter)
    assert found.prediction.fits and found.plan.stages == plan.stages


def least_memory(costed: CostedGraph, request: Request) -> Least:
    """The plan of the least sums, from what a search says that has no memory."""
    with pytest.raises(MemoryTooSmall) as refused:
        search(GRAPH, make_cluster(2 if request.batch > 1 else 1, 1), request, costing=lambda _: costed)
    return refused.value.least
