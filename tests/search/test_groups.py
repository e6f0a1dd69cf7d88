"""ZeRO groups: which are candidates, which are left out, and that none of those was needed."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, dataclass, replace

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner.constraints_text import parse_constraints
from planner.costing.state_prices import state_costs
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph, StateCost
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.ir.plan import AXIS_ORDERS, Batch, BlockDecision, Mesh, Plan, Prediction, Schedule, ScheduleName, StagePlan
from planner.search import Request, parse_pins, search
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.engine import planning_engine
from planner.search.families import Scope
from planner.search.nodes import _try_each
from planner.search.prices import Prices
from planner.search.request import as_it_is
from planner.search.solve import Fingerprints, Task, try_stages
from tests.costing.test_measured_memory import graph_of
from tests.oracles.exhaustive_plan import best_plan
from tests.search.made import make_cluster, make_costed, make_graph
from tests.wide import wide

NAMES = Fingerprints("made", "", "made", "")


def groups_of(*conditions: str, each: int, pipeline: int = 1) -> set[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """Of all candidates with 64 data ranks on nodes of ``each`` devices."""
    nodes = 64 * pipeline // each
    cluster = replace(resolve_cluster(f"dgx-h100:{nodes}"), devices_per_node=each)
    pins = ["data=64", f"pipeline={pipeline}", "tensor=1", "virtual=1", "axis_order=pipeline-data-tensor", *conditions]
    request = Request(64, 4, "fp32", parse_constraints(pins))
    return {(c.zero_groups, c.once_groups) for c in enumerate_candidates(make_graph("eaah"), cluster, request)}


def test_every_divisor_is_a_group() -> None:
    """Those that are alike are together: across nodes or inside one, and nearly as much of what is sharded comes from other
    ranks."""
    assert groups_of(each=2) == {(((64, 32, 16), (8,), (4,), (2,), (1,)), ())}
    assert groups_of(each=16) == {(((64, 32), (16, 8), (4,), (2,), (1,)), ())}
    assert groups_of("zero=0", each=2) == {(((64,),), ())}
    assert groups_of("zero=3", each=2) == groups_of(each=2)


def test_groups_under_a_pipeline() -> None:
    """Those unlike the whole axis and a node's part send once a step."""
    assert groups_of(each=16, pipeline=2) == {(((64, 32), (16, 8)), (4, 2))}
    assert groups_of(each=2, pipeline=2) == {(((64, 32, 16), (2,)), (8, 4))}
    assert groups_of(each=128, pipeline=2) == {(((64, 32, 16),), (8, 4, 2))}
    every = {(((64, 32), (16, 8), (4,), (2,), (1,)), ())}
    assert groups_of("zero=3", each=16, pipeline=2) == every, "where all blocks send for every micro-batch, as asked for"
    assert groups_of("blocks.1: zero=3", each=16, pipeline=2) == every, "where one does"


@pytest.mark.parametrize(("pipeline", "expected"), [
    (1, (((24, 12), (8,), (6,), (4,), (3,), (2,), (1,)), ())), (2, (((12, 6), (4,)), (3, 2))),
])
def test_groups_that_do_not_fill_nodes_cross_them(pipeline: int, expected: object) -> None:
    """On three nodes of eight every second group of six lies in two."""
    pins = parse_constraints([f"pipeline={pipeline}", "tensor=1", "virtual=1", "axis_order=pipeline-data-tensor"])
    found = enumerate_candidates(make_graph("eaah"), resolve_cluster("dgx-h100:3"), Request(24, 4, "fp32", pins))
    assert {(c.zero_groups, c.once_groups) for c in found} == {expected}


def test_constraints_on_groups() -> None:
    """Those that they admit, with all stages."""
    for pipeline in (1, 2):
        assert groups_of("zero_group<=4", each=2, pipeline=pipeline) == {(((4,), (2,), (1,)), ())}
        assert groups_of("zero_group=4", each=2, pipeline=pipeline) == {(((4,),), ())}
    # Data axes that it does not divide are none.
    request = Request(8, 4, "fp32", parse_constraints(["zero_group=4"]))
    assert {c.mesh.data for c in enumerate_candidates(make_graph("eaah"), resolve_cluster("dgx-h100:1"), request)} == {4, 8}
    # Where one group may not have a stage, it is another candidate.
    request = Request(8, 4, "fp32", parse_constraints(["data=8"], ["zero_group=4, zero=3"]))
    found = enumerate_candidates(make_graph("eaah"), resolve_cluster("dgx-h100:1"), request)
    assert {c.zero_groups for c in found if c.schedule != "zbv"} >= {((8,), (2,), (1,)), ((4,),)}


def test_a_combination_speaks_of_the_meshes_that_it_can_forbid() -> None:
    """Of these all groups are candidates, with all stages; of others those that are without it."""
    request = Request(128, 4, "fp32", parse_constraints(["data=64", "tensor<=2", "pipeline<=4", "virtual=1"]))
    cluster, graph = replace(resolve_cluster("dgx-h100:32"), nodes=16, devices_per_node=16), make_graph("eaah")
    forbidden = parse_constraints((), ["pipeline=2, zero_group=8"]).forbidden
    asked = replace(request, constraints=request.constraints.with_(*forbidden))
    groups = {
        pipeline: [
            {(c.zero_groups, c.once_groups) for c in enumerate_candidates(graph, cluster, each)
             if c.mesh.order == AXIS_ORDERS[0] and c.mesh.pipeline == pipeline} for each in (request, asked)
        ]
        for pipeline in (2, 4)
    }
    assert groups[2] == [{(((64, 32, 16), (8,)), (4, 2))}, {(((64, 32, 16), (4,), (2,), (1,)), ())}]
    assert groups[4][0] == groups[4][1]


@dataclass(frozen=True)
class ByGroup:
    """Prices that differ in what parameters cost under a ZeRO group."""

    whole: CostedGraph
    smaller: CostedGraph

    def __call__(self, candidate: Candidate) -> CostedGraph:
        return self.whole if candidate.zero_group == candidate.mesh.data else self.smaller


def by_group(seed: int, chain: str) -> ByGroup:
    """Under the smaller group stages 1 and 3 are quicker and take more memory."""
    draw = random.Random(seed)
    whole = make_costed(make_graph(chain), seed, zeros=(0, 1, 3), crossing=4)
    part, more = draw.uniform(0.2, 1.2), draw.randint(0, 60)

    def smaller(states: dict[int, StateCost]) -> dict[int, StateCost]:
        def with_part(state: StateCost) -> StateCost:
            return replace(
                state, once_comm_s=part * state.once_comm_s, forward_comm_s=part * state.forward_comm_s,
                backward_comm_s=part * state.backward_comm_s, optimizer_bytes=state.optimizer_bytes + more,
            )

        return {**states, 1: with_part(states[1]), 3: with_part(states[3])}

    states = tuple({name: smaller(dict(each)) for name, each in option.items()} for option in whole.states)
    return ByGroup(whole, replace(whole, states=states))


def best_of_each(prices: ByGroup, memory: int, schedule: ScheduleName, pipeline: int) -> dict[int, tuple[Plan, Prediction]]:
    """Every plan of either group, evaluated: under a pipeline the smaller group's without stage 3."""
    found = {}
    for group, costed, zeros in ((4, prices.whole, (0, 1, 3)), (2, prices.smaller, (0, 1) if pipeline > 1 else (0, 1, 3))):
        template = Plan(
            "made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline, data=4), Batch(16, 1, 4), Schedule(schedule, 1), group,
            (), costed.placements[0],
        )
        choices = tuple(BlockDecision(zero, level) for zero in zeros for level in ("none", "full"))
        best = best_plan(template, costed, make_cluster(4 * pipeline, memory), choices)
        if best is not None:
            found[group] = best
    return found


def solved(prices: ByGroup, memory: int, schedule: ScheduleName, pipeline: int, chain: str) -> tuple[int, float, float] | None:
    """The group of the plan that is found, its step and the bound."""
    pins = parse_pins([f"pipeline={pipeline}", f"schedule={schedule}", "tensor=1", "virtual=1", "microbatch=1", "data=4"])
    cluster = make_cluster(4 * pipeline, memory)
    try:
        result = search(make_graph(chain), cluster, Request(16, 4, "fp32", pins, gap=1e-4), costing=prices)
    except NoPlanFits:
        return None
    costed = prices.whole if result.plan.zero_group == 4 else prices.smaller
    assert evaluate(result.plan, costed, cluster) == result.prediction
    return result.plan.zero_group, result.prediction.step_s, result.lower_bound_s


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)])
def test_the_best_group_is_found(schedule: ScheduleName, pipeline: int) -> None:
    """Against every plan of every group; now the one is better, now the other, and they are not mixed."""
    winners = set()
    for seed in range(24):
        chain, memory = "eaa", 150 + 40 * seed % 700
        prices = by_group(seed, chain)
        expected, found = best_of_each(prices, memory, schedule, pipeline), solved(prices, memory, schedule, pipeline, chain)
        assert (found is None) == (not expected)
        if found is not None:
            group, step_s, bound_s = found
            best = min(expected, key=lambda each: expected[each][1].step_s)
            best_s = expected[best][1].step_s
            assert bound_s <= best_s * (1 + 1e-6), "the bound excludes a real plan"
            assert step_s <= best_s * (1 + 1e-4)
            if all(other == best or expected[other][1].step_s > best_s * 1.001 for other in expected):
                assert group == best
                winners.add(group)
    assert winners == {2, 4}


def test_several_groups_are_no_worse_than_any() -> None:
    """In everything, as long as they are one chain; which is parted until each is alone."""
    prices = by_group(3, "eaaah")
    candidate = Candidate(Mesh(pipeline=1, data=8), 1, 4, "1f1b", 1, ((8,),), (4, 2))
    scope = Scope(prices.whole.graph, prices, make_cluster(8, 10**6), Request(32, 4, "fp32"), NAMES)
    family = scope.family(candidate)
    assert family is not None
    (chain,) = family.chains
    assert chain.zero_groups == (8, 4, 2) and [each.zero_groups for each in chain.each] == [(8,), (4,), (2,)]
    for run, (_, joined) in enumerate(chain.single):
        rows = dict(zip(joined.names, joined.columns, strict=True))
        for each in chain.each:
            own = each.single[run][1]
            assert all((rows[name] <= row).all() for name, row in zip(own.names, own.columns, strict=True))
        assert all(3 not in each.single[run][1].names for each in chain.each[1:])
    parts = [bundle.chains for bundle in family.apart((chain,))]
    assert [[each.zero_groups for each in part] for part in parts] == [[(8,)], [(4, 2)]]
    assert family.chosen({parts[1][0].name}) == list(parts[1])
    assert [each.zero_groups for each in family.chosen({each.name for each in chain.each})] == [(8,), (4,), (2,)]


def test_stages_are_tried_under_the_quickest_group_that_fits() -> None:
    """The best of all groups is found where blocks send once a step, without a look at slower ones; where they send for every
    micro-batch all are looked at."""
    looked: dict[bool, list[int]] = {False: [], True: []}
    for seed in range(40):
        prices, memory = by_group(seed, "eaaah"), 60 + 25 * seed
        candidate = Candidate(Mesh(pipeline=1, data=8), 1, 4, "1f1b", 1, ((8,), (4,), (2,)))
        scope = Scope(prices.whole.graph, prices, make_cluster(8, memory), Request(32, 4, "fp32"), NAMES)
        family = scope.family(candidate)
        assert family is not None
        each = [Task(candidate, chain, scope.cluster, scope.request, NAMES) for one in family.chains for chain in one.each]
        draw = random.Random(seed)
        for often in (False, True):
            zeros = [draw.choice((0, 1, 3) if often else (0, 1)) for _ in range(4)] + [3 if often else 1]
            stages = (StagePlan(0, 0, 5, tuple(BlockDecision(zero, "none") for zero in zeros)),)
            fitting = [p for task in each if (p := try_stages(task, stages, as_it_is)).fits]
            best_s = min((prediction.step_s for prediction in fitting), default=math.inf)
            found = _try_each(each, stages, as_it_is)
            assert min((p.step_s for p in found if p.fits), default=math.inf) == best_s
            looked[often].append(len(found))
            for first in (task for task in each if try_stages(task, stages, as_it_is).fits):
                first_s = try_stages(first, stages, as_it_is).step_s
                others = _try_each([task for task in each if task is not first], stages, as_it_is, first)
                assert min(first_s, *(p.step_s for p in others if p.fits), math.inf) == best_s
    assert set(looked[False]) == {1, 3} and set(looked[True]) == {3}, "one is enough, or none fits"


@pytest.mark.slow
def test_a_group_that_is_left_out_is_beaten_in_everything() -> None:
    """By a larger one; and a group that is kept is not."""
    graph, cluster = graph_of("gpt", "float32"), resolve_cluster("dgx-h100:16")
    request = Request(512, graph.sequence, "fp32")
    candidates = enumerate_candidates(graph, cluster, request)
    prices, engine = Prices(graph, cluster, request, candidates), planning_engine()
    kept_and_left = [0, 0]
    for candidate in {c.mesh: c for c in candidates if c.once_groups and c.mesh.tensor <= 2}.values():
        kept = prices.without_beaten(candidate)
        assert kept.zero_groups == candidate.zero_groups
        costs = {
            group: [
                _costs(state[1])
                for option in state_costs(
                    graph, prices.options(candidate.mesh.tensor), cluster, candidate.mesh, "fp32", group,
                    candidate.accumulation,
                )
                for state in option.values()
            ]
            for group in candidate.groups
        }
        assert engine.gradients_hidden == 0
        for group in candidate.once_groups:
            beaten = any(_no_worse(costs[other], costs[group]) for other in candidate.groups if other > group)
            assert beaten == (group not in kept.once_groups)
            kept_and_left[beaten] += 1
        for each in kept.each:
            alone = state_costs(
                graph, prices.options(candidate.mesh.tensor), cluster, candidate.mesh, "fp32", each.zero_group,
                candidate.accumulation, (0, 1) if each.once_groups else (0, 1, 2, 3),
            )
            assert prices.states(each) == alone
    assert min(kept_and_left) > 3


def _costs(state: StateCost) -> tuple[float, ...]:
    """All of a state, the update and what is sent once as one time."""
    floor = planning_engine().gradients_floor
    return *astuple(replace(state, once_comm_s=0.0, optimizer_s=0.0)), floor * state.once_comm_s + state.optimizer_s


def _no_worse(one: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> bool:
    return all(a <= b for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "memory_mib", "best"), [(1, 8, 16), wide(1, 12, None), wide(1, 20, None), (2, 8, None), wide(2, 12, None)]
)
def test_no_group_that_is_asked_for_is_quicker(pipeline: int, memory_mib: int, best: int | None) -> None:
    """Where memory is short: two nodes, neither all nor one, can be the best group for what is sent with every micro-batch."""
    graph, cluster = graph_of("gpt", "float32"), resolve_cluster("dgx-h100:8")
    chip = replace(cluster.chip, memory_bytes=cluster.chip.reserve_bytes + memory_mib * 2**20)
    cluster = replace(cluster, chip=chip)
    found = _fitting(graph, cluster, pipeline, None)
    assert best is None or found[0] == best
    asked = (_fitting(graph, cluster, pipeline, group) for group in (64 // pipeline, 32 // pipeline, 16, 8, 4, 2))
    steps = [step_s for _, step_s in asked]
    assert min(steps) < math.inf
    assert found[1] <= min(steps) * (1 + 1e-4)


def _fitting(graph: ModelGraph, cluster: Cluster, pipeline: int, group: int | None) -> tuple[int, float]:
    """The ZeRO group and the step of the best plan; infinite without any."""
    pins = [f"pipeline={pipeline}", "tensor=1", "microbatch=1", "schedule=1f1b", *([f"zero_group={group}"] if group else [])]
    try:
        result = search(graph, cluster, Request(256, graph.sequence, "fp32", parse_pins(pins), gap=1e-4))
    except NoPlanFits:
        return 0, math.inf
    return result.plan.zero_group, result.prediction.step_s
