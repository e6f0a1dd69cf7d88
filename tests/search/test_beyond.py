"""Plans whose memory fits by a closer look and not by the sums that the search holds plans to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.compile import load_cluster
from planner.constraints_kept import broken_limit
from planner.constraints_text import parse_constraints
from planner.evaluate import evaluate
from planner.fitting import fitted
from planner.ir.costed import CostedGraph, Recompute
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Prediction, Schedule
from planner.search import Request, beyond, parse_pins, refusal, search
from planner.search.best import Best
from planner.search.beyond import Beyond
from planner.search.candidates import enumerate_candidates
from planner.search.families import Scope
from planner.search.least import Least
from planner.search.refusal import MemoryTooSmall
from planner.search.request import Look
from planner.search.solve import Fingerprints, Task, chains_of
from planner.search.uniform import ladders
from planner.trace import load_model, trace_model
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
    for name in ("go", "finish"):
        monkeypatch.setattr(Beyond, name, lambda *_: None)
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


LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")
SHORT = make_graph(list("eaaab"))


def lighter_alike(zero: int, but: Sequence[int] = ()) -> Look:
    """Plans that have this ZeRO stage in all blocks ``but`` these take less than their sums."""
    def look(plan: Plan, prediction: Prediction) -> Prediction:
        decisions = [decision for stage in plan.stages for decision in stage.decisions]
        if any(decision.zero != zero for at, decision in enumerate(decisions) if at not in but):
            return prediction
        state = max(each.memory.parameters + each.memory.gradients + each.memory.optimizer for each in prediction.stages)
        return replace(prediction, peak_memory_bytes=max(state, int(0.82 * prediction.peak_memory_bytes)))

    return look


def seen_under(costed: CostedGraph, request: Request, zero: int, look: Look) -> list[tuple[int, float, Plan]]:
    """Bytes as looked at and seconds of every plan of one stage."""
    template = Plan(
        "made", "", "made", "", "fp32", 4, Mesh(), Batch(request.batch, 1, request.batch), Schedule("1f1b", 1), 1, (),
        costed.placements[0],
    )
    plans = every_plan(template, costed, tuple(BlockDecision(zero, level) for level in LEVELS))
    found = [(plan, look(plan, evaluate(plan, costed, make_cluster(1, 10_000)))) for plan in plans]
    return [(prediction.peak_memory_bytes, prediction.step_s, plan) for plan, prediction in found]


@pytest.mark.parametrize("seed, part", [(4, 0.0), (4, 0.3), (4, 0.6), (3, 1.0), (5, 0.6)])
def test_one_stage_for_all_blocks_is_found(seed: int, part: float) -> None:
    """ZeRO 2 throughout takes less than its sums; others, whose sums are less, do not. ``part``: of the way from the least
    memory of such a plan to the most."""
    costed = make_costed(SHORT, seed, zeros=(0, 2, 3), levels=LEVELS, crossing=4)
    request, look = replace(REQUEST, batch=4), lighter_alike(2)
    plans = seen_under(costed, request, 2, look)
    peaks = [peak for peak, _, _ in plans]
    least, most = min(peaks), max(peaks)
    limit = round(least + part * (most - least))
    result = search(SHORT, make_cluster(1, limit), request, costing=lambda _: costed, look=look)
    fitting = [(step_s, plan) for peak, step_s, plan in plans if peak <= limit]
    alike = [step_s for step_s, plan in fitting if len(set(plan.stages[0].decisions)) == 1]
    assert result.prediction.fits
    assert result.prediction.step_s <= min(alike) * (1 + 1e-9)
    assert result.prediction.step_s <= min(step_s for step_s, _ in fitting) * 1.03


@pytest.mark.parametrize("pins, forbidden", [
    (["blocks.2:zero=0"], []),
    (["blocks.2:zero=0", "blocks.1:recompute=full"], ["blocks.4:recompute=none"]),
    (["blocks.2:zero=0"], ["zero_group=1, blocks.3:recompute=none"]),
])
def test_plans_of_one_stage_keep_constraints(pins: list[str], forbidden: list[str]) -> None:
    """A block that may not have the stage has its own."""
    costed = make_costed(SHORT, 4, zeros=(0, 2, 3), levels=LEVELS, crossing=4)
    alone = ["pipeline=1", "tensor=1", "microbatch=1"]
    request, look = Request(4, 4, "fp32", parse_constraints([*alone, *pins], forbidden), gap=1e-4), lighter_alike(2, (2,))
    roomy, seen = search(SHORT, make_cluster(1, 10_000), request, costing=lambda _: costed), list[Plan]()

    def kept(plan: Plan, prediction: Prediction) -> Prediction:
        assert broken_limit(request.constraints, plan, SHORT, make_cluster(1, 10_000), prediction) is None
        seen.append(plan)
        return look(plan, prediction)

    cluster = make_cluster(1, round(0.75 * roomy.prediction.peak_memory_bytes))
    found = search(SHORT, cluster, request, costing=lambda _: costed, look=kept)
    assert found.prediction.fits and found.plan in seen
    assert [2, 2, 0, 2, 2] in [[decision.zero for decision in plan.stages[0].decisions] for plan in seen]


def test_headroom_holds_for_plans_of_one_stage() -> None:
    costed, look = make_costed(SHORT, 4, zeros=(0, 2, 3), levels=LEVELS, crossing=4), lighter_alike(2)
    constraints = parse_constraints(["pipeline=1", "tensor=1", "microbatch=1"], headroom="25%")
    limit = min(peak for peak, _, _ in seen_under(costed, replace(REQUEST, batch=4), 2, look))
    cluster = make_cluster(1, -(-limit * 4 // 3))
    found = search(SHORT, cluster, Request(4, 4, "fp32", constraints, gap=1e-4), costing=lambda _: costed, look=look)
    assert broken_limit(constraints, found.plan, SHORT, cluster, found.prediction) is None
    assert {decision.zero for decision in found.plan.stages[0].decisions} == {2}


def tasks_of(costed: CostedGraph, request: Request, devices: int = 1) -> list[Task]:
    cluster = make_cluster(devices, 10_000)
    candidates = enumerate_candidates(costed.graph, cluster, request)
    names = Fingerprints("made", "", "made", "")
    chains = [(each, chain) for each in candidates for chain in chains_of((costed,), each, request)]
    return [Task(candidate, chain, cluster, request, names) for candidate, chain in chains]


def test_a_ladder_for_each_stage_goes_up_from_the_thriftiest_to_the_quickest() -> None:
    costed = make_costed(SHORT, 1, zeros=(0, 2, 3), levels=LEVELS, crossing=4)
    found = list(ladders(tasks_of(costed, REQUEST)))
    assert [{decision.zero for decision in each[0].plan.stages[0].decisions} for each in found] == [{0}, {2}, {3}]
    for ladder in found:
        rungs = [ladder[at] for at in range(len(ladder))]
        steps, alike = [rung.prediction.step_s for rung in rungs], list(ladder.of_one_level)
        assert steps == sorted(steps, reverse=True)
        assert [len(set(rung.plan.stages[0].decisions)) for rung in alike] == [1] * len(alike)
        assert (alike[0].plan, alike[-1].plan) == (rungs[0].plan, rungs[-1].plan)
        last = [decision.recompute for decision in rungs[1].plan.stages[0].decisions]
        assert len(set(last[:-1])) == 1 and last[-1] != last[0]


def test_blocks_of_tied_parameters_share_the_stage_of_a_ladder() -> None:
    graph = make_graph(list("eaaab"), tied=True)
    costed = make_costed(graph, 1, zeros=(0, 2, 3), levels=("none", "full"), crossing=4)
    constraints = parse_constraints(["pipeline=1", "tensor=1", "microbatch=1", "zero_group=1", "blocks.4:zero<=2"])
    for ladder in ladders(tasks_of(costed, replace(REQUEST, constraints=constraints))):
        zeros = [decision.zero for decision in ladder[0].plan.stages[0].decisions]
        assert zeros[0] == zeros[4] <= 2 and len(set(zeros[1:4])) == 1
        assert zeros[0] == min(zeros[1], 2) or zeros[0] != 2, "the nearest that it may have"


def test_before_a_refusal_plans_of_one_stage_are_looked_at() -> None:
    """Behind a pipeline, where the plan of the least sums does not fit and is none of them."""
    graph = make_graph(list("eaab"))
    costed = make_costed(graph, 7, zeros=(0, 2, 3), levels=LEVELS, crossing=4)
    constraints = parse_pins(["pipeline=2", "tensor=1", "schedule=1f1b", "virtual=1", "microbatch=1"])
    request, look = Request(4, 4, "fp32", constraints, gap=1e-4), lighter_alike(2)
    rungs = [ladder[0] for ladder in ladders(tasks_of(costed, request, devices=2))]
    limit = min(look(rung.plan, rung.prediction).peak_memory_bytes for rung in rungs)
    with pytest.raises(MemoryTooSmall):
        search(graph, make_cluster(2, limit), request, costing=lambda _: costed)
    found = search(graph, make_cluster(2, limit), request, costing=lambda _: costed, look=look)
    assert found.prediction.fits
    assert {decision.zero for stage in found.plan.stages for decision in stage.decisions} == {2}


TIED = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(2000, 64)
        self.m = nn.ModuleList(nn.Sequential(nn.Linear(64, h), nn.GELU(), nn.Linear(h, 64)) for h in (128, 1024, 512))
        self.h = nn.Linear(64, 2000, bias=False)
        self.h.weight = self.e.weight

    def forward(self, input_ids):
        x = self.e(input_ids)
        for m in self.m:
            x = x + m(x)
        return self.h(x)


def example_inputs(batch_size, sequence):
    return {name: torch.randint(2000, (batch_size, 16)) for name in ("input_ids", "labels")}


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())
"""


@pytest.mark.slow
def test_no_plan_of_one_stage_of_a_real_net_is_quicker(tmp_path: Path) -> None:
    """Blocks that are all different, the ends tied: with less memory than this the search knew slower plans, or none."""
    (tmp_path / "net.py").write_text(TIED)
    graph = trace_model(load_model(f"{tmp_path / 'net.py'}:Net", {}, None), sequence=None, dtype="float32")
    cluster = load_cluster("local-cpu:1x2")

    def planned(memory: float, *pins: str) -> Prediction:
        chip = replace(cluster.chip, reserve_bytes=0, memory_bytes=round(memory))
        request = Request(16, graph.sequence, "fp32", parse_pins(["data=2", *pins]))
        return fitted(graph, replace(cluster, chip=chip), request).prediction

    most = planned(2**40).peak_memory_bytes
    for part, zero in ((0.6, 3), (0.65, 1)):
        alike = planned(part * most, f"zero={zero}", "recompute=full", "microbatch=8", "zero_group=2")
        assert alike.fits
        assert planned(part * most).step_s <= 1.001 * alike.step_s


def least_memory(costed: CostedGraph, request: Request) -> Least:
    """The plan of the least sums, from what a search says that has no memory."""
    with pytest.raises(MemoryTooSmall) as refused:
        search(GRAPH, make_cluster(2 if request.batch > 1 else 1, 1), request, costing=lambda _: costed)
    return refused.value.least
