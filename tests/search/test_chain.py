"""A chain that beats another of its candidate: every plan of that one has one as good, by the evaluator alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.placement import SHARED, BodyPlacement
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName
from planner.search.allowed import Allowed
from planner.search.chain import Chain, without_beaten
from planner.search.engine import planning_engine
from tests.oracles.exhaustive_plan import every_plan
from tests.search.made import make_cluster, make_costed, make_graph

BODIES, LEVELS, ZEROS = list("eaab"), ("none", "full"), (0, 2)
CHOICES = tuple(BlockDecision(zero, level) for zero in ZEROS for level in LEVELS)
CLUSTER = make_cluster(4, 10_000, bandwidth=2000.0)
ENGINE = planning_engine()


def varied(draw: Random, cost: Any, names: tuple[str, ...], worse: float) -> Any:
    """Some of what a block costs is more, with the rest of the chance less."""
    changes = {}
    for name in names:
        value = getattr(cost, name)
        if value and draw.random() < 0.5:
            by = 1 + draw.choice((0.0, 0.3)) if draw.random() < worse else 0.8
            changes[name] = round(value * by) if isinstance(value, int) else value * by
    return replace(cost, **changes)


BLOCK = ("forward_s", "input_gradient_s", "weight_gradient_s", "recompute_s", "saved_bytes", "forward_peak_bytes",
         "backward_peak_bytes", "waiting_bytes")
STATE = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "gather_bytes", "once_comm_s", "forward_comm_s",
         "backward_comm_s", "optimizer_s")


def two_options(seed: int, worse: float) -> CostedGraph:
    """Random prices, and another option in which each of them differs by chance."""
    draw = Random(seed)
    costed = make_costed(make_graph(BODIES), seed, zeros=ZEROS, levels=LEVELS, crossing=draw.randint(4, 9))
    (blocks,), (states,), (cuts,), (placements,) = costed.blocks, costed.states, costed.crossing_bytes, costed.placements
    more = draw.choice((0, 0, 1, -1))
    other: Mapping[str, BodyPlacement] = {name: replace(each, parameters=(SHARED,)) for name, each in placements.items()}
    return replace(
        costed, placements=(placements, other), crossing_bytes=(cuts, {cut: size + more for cut, size in cuts.items()}),
        received_bytes=tuple({cut: draw.randint(0, 3) for cut in cuts} for _ in range(2)) if draw.random() < 0.5 else (),
        blocks=(blocks, {
            name: {level: varied(draw, cost, BLOCK, worse) for level, cost in levels.items()} for name, levels in blocks.items()
        }),
        states=(states, {
            name: {zero: varied(draw, cost, STATE, worse) for zero, cost in zeros.items()} for name, zeros in states.items()
        }),
    )


def chains_of(costed: CostedGraph, *, split: bool = False) -> list[Chain]:
    allowed = Allowed(LEVELS, ZEROS, split=split)
    return [Chain((costed,), option, allowed, (2,)) for option in range(len(costed.placements))]


def seen(costed: CostedGraph, option: int, schedule: ScheduleName, virtual: int) -> list[tuple[float, int]]:
    """Step and memory of every plan under an option."""
    template = Plan(
        "made", "", "made", "", "fp32", 4, Mesh(pipeline=2, data=2), Batch(8, 1, 4), Schedule(schedule, virtual), 2, (),
        costed.placements[option],
    )
    predictions = (evaluate(plan, costed, CLUSTER) for plan in every_plan(template, costed, CHOICES))
    return [(prediction.step_s, prediction.peak_memory_bytes) for prediction in predictions]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zbv", 2)])
def test_what_beats_a_chain_has_a_plan_for_each_of_its_plans(schedule: ScheduleName, virtual: int) -> None:
    beaten = 0
    for seed in range(40):
        costed = two_options(seed, worse=1.0 if seed % 4 else 0.97)
        one, other = chains_of(costed, split=schedule == "zbv")
        if not one.beats(other):
            continue
        beaten += 1
        mine = sorted(seen(costed, 0, schedule, virtual))
        for step_s, peak_bytes in seen(costed, 1, schedule, virtual):
            assert any(s <= step_s * (1 + 1e-12) and b <= peak_bytes for s, b in mine), f"seed {seed}: {step_s}, {peak_bytes}"
    assert 8 <= beaten <= 35


@pytest.mark.parametrize("names", [
    ("forward_s",), ("input_gradient_s",), ("weight_gradient_s",), ("recompute_s",), ("saved_bytes",), ("waiting_bytes",),
    ("forward_peak_bytes", "backward_peak_bytes"),
])
def test_a_chain_that_is_better_in_anything_is_kept(names: tuple[str, ...]) -> None:
    costed = make_costed(make_graph(BODIES), 0, zeros=ZEROS, levels=LEVELS)
    (blocks,), level = costed.blocks, "full" if names == ("recompute_s",) else "none"
    cost = blocks["a"][level]
    less = replace(cost, **{name: type(getattr(cost, name))(0) for name in names})
    first, second = chains_of(replace(
        costed, placements=costed.placements * 2, blocks=(blocks, {**blocks, "a": {**blocks["a"], level: less}}),
        states=costed.states * 2, crossing_bytes=costed.crossing_bytes * 2,
    ), split=True)
    assert not first.beats(second) and second.beats(first)
    assert without_beaten([first, second], ENGINE) == (second,)


def test_of_chains_that_are_the_same_the_first_is_kept() -> None:
    costed = make_costed(make_graph(BODIES), 1, zeros=ZEROS, levels=LEVELS)
    same = replace(costed, placements=costed.placements * 2, blocks=costed.blocks * 2, states=costed.states * 2,
                   crossing_bytes=costed.crossing_bytes * 2)
    one, other = chains_of(same)
    assert without_beaten([one, other], ENGINE) == (one,) and without_beaten([other, one], ENGINE) == (other,)
    hides = replace(ENGINE, gathers_hidden=0.5)
    assert without_beaten([one, other], hides) == (one, other), "less compute may hide less"
    alone = Chain(one.priced, 1, one.allowed, (4,))
    assert without_beaten([one, alone], ENGINE) == (one, alone), "of another ZeRO group"


def test_what_lies_in_receive_buffers_is_no_reason_to_keep_more() -> None:
    """As much is kept, of which less lies where it was received: more memory."""
    costed = make_costed(make_graph(BODIES), 1, zeros=ZEROS, levels=LEVELS, crossing=8)
    cuts = costed.crossing_bytes[0]
    costed = replace(
        costed, placements=costed.placements * 2, blocks=costed.blocks * 2, states=costed.states * 2,
        crossing_bytes=costed.crossing_bytes * 2, received_bytes=(dict.fromkeys(cuts, 1), dict.fromkeys(cuts, 4)),
    )
    one, other = chains_of(costed)
    assert not one.beats(other) and other.beats(one)
    one, other = chains_of(costed, split=True)
    assert one.beats(other) and other.beats(one)


def test_shared_parameters_lie_alike() -> None:
    """The sum of their gradients over stages is no block's."""
    costed = make_costed(make_graph(BODIES, tied=True), 1, zeros=ZEROS, levels=LEVELS)
    (placements,) = costed.placements
    other = {name: replace(each, parameters=(SHARED,)) for name, each in placements.items()}
    costed = replace(costed, placements=(placements, other), blocks=costed.blocks * 2, states=costed.states * 2,
                     crossing_bytes=costed.crossing_bytes * 2)
    one, two = chains_of(costed)
    assert without_beaten([one, two], ENGINE) == (one, two)
