"""Every plan of a small candidate, through the evaluator, without columns, tables or bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hardware_profiles import Cluster, Engine
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.plan import BlockDecision, Plan, Prediction, StagePlan


def every_plan(template: Plan, costed: CostedGraph, choices: tuple[BlockDecision, ...]) -> Iterator[Plan]:
    """All cuts and all decisions of every block, on the template's mesh and schedule."""
    count = len(costed.graph.blocks)
    stages = template.mesh.pipeline * template.schedule.virtual
    for cuts in itertools.combinations(range(1, count), stages - 1):
        bounds = (0, *cuts, count)
        for decisions in itertools.product(choices, repeat=count):
            yield replace(template, stages=tuple(
                StagePlan(i, bounds[i], bounds[i + 1], decisions[bounds[i] : bounds[i + 1]]) for i in range(stages)
            ))


def best_plan(
    template: Plan, costed: CostedGraph, cluster: Cluster, choices: tuple[BlockDecision, ...], *, tied: bool = False,
    engine: Engine | None = None,
) -> tuple[Plan, Prediction] | None:
    """The quickest plan that fits, or None. ``tied``: the first and the last block share a parameter, so a ZeRO stage."""
    best: tuple[Plan, Prediction] | None = None
    for plan in every_plan(template, costed, choices):
        if tied and plan.stages[0].decisions[0].zero != plan.stages[-1].decisions[-1].zero:
            continue
        prediction = evaluate(plan, costed, cluster, engine)
        if prediction.fits and (best is None or prediction.step_s < best[1].step_s):
            best = plan, prediction
    return best

