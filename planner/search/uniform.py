"""Plans of one ZeRO stage for all blocks, and of one or two levels of recomputation.

The sums that the search holds plans to are near the truth for most plans, and far above it for some: what ZeRO 3 gathers and
activations are not most at the same time, so a step with ZeRO 3 throughout may take much less than its sums say. Plans of
several stages have less by their sums and take nearly as much. So a search by sums comes to no plan of one stage where memory
is tight, and a closer look has to be taken at these by themselves. They are few: a ladder for each stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.evaluate import evaluate
from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.plan import BlockDecision, Plan, Prediction, StagePlan
from planner.search.candidates import shape_of
from planner.search.chain import Chain
from planner.search.greedy import even_cuts
from planner.search.solve import Task

ZERO_STAGES, ALONE = (0, 1, 2, 3), (0, 2, 3)
"""Of several ranks, and of one, to which the first two are the same."""
Decisions = tuple[BlockDecision, ...]
"""Of all blocks of the chain."""


@dataclass(frozen=True)
class Rung:
    """A plan, and what its sums say; ``reserve_bytes``: of a device."""

    plan: Plan
    prediction: Prediction
    reserve_bytes: int

    @property
    def sums_bytes(self) -> int:
        return self.prediction.peak_memory_bytes

    @property
    def state_bytes(self) -> int:
        """Parameters, optimizer state and, from the second micro-batch on, gradients, which are all there when the last
        backward pass begins: no look at the plan sees less."""
        memories, accumulates = [stage.memory for stage in self.prediction.stages], self.plan.batch.accumulation > 1
        states = (each.parameters + each.optimizer + accumulates * each.gradients for each in memories)
        return max(states) + self.reserve_bytes

    def may_fit(self, limit_bytes: int, wider: float) -> bool:
        """By a closer look, with sums of so many times the limit at most."""
        return self.state_bytes <= limit_bytes and self.sums_bytes <= wider * limit_bytes


@dataclass(frozen=True)
class Ladder:
    """Plans of one ZeRO stage, from the one of least memory to the quickest: from rung to rung one block more takes the quicker
    level of recomputation, the last ones first, whose activations go first. ``uniform``: the rungs on which all blocks have
    the same one, with ``steps`` rungs from one to the next; ``bounds``: of stages with even cuts."""

    task: Task
    bounds: tuple[int, ...]
    uniform: tuple[Decisions, ...]

    @property
    def steps(self) -> int:
        return self.bounds[-1]

    def __len__(self) -> int:
        return (len(self.uniform) - 1) * self.steps + 1

    @property
    def of_one_level(self) -> Iterator[Rung]:
        """The rungs on which all blocks have the same level, or the nearest to it."""
        return (self[at] for at in range(0, len(self), self.steps))

    def __getitem__(self, at: int) -> Rung:
        level, quicker = divmod(range(len(self))[at], self.steps)
        kept = self.steps - quicker
        return _rung(self.task, self.bounds, self.uniform[level][:kept] + (self.uniform[level + 1][kept:] if quicker else ()))


def ladders(tasks: Iterable[Task]) -> Iterator[Ladder]:
    """Of chains of one ZeRO group, one for each of these, each option of placements and each ZeRO stage, which all blocks have
    that may have it; others, and blocks of tied parameters together, have the nearest."""
    alike: dict[object, list[Task]] = {}
    for task in tasks:
        chain = task.chain
        alike.setdefault((chain.zero_group, chain.option, replace(chain.allowed, fixed_zero=())), []).append(task)
    for some in alike.values():
        found = dict[Decisions, Ladder]()
        for zero in ZERO_STAGES if some[0].chain.zero_group > 1 else ALONE:
            ladder = _ladder(min(some, key=lambda task: _distance(task.chain, zero)), zero)
            found.setdefault(ladder.uniform[0], ladder)
        yield from found.values()


def _distance(chain: Chain, zero: int) -> int:
    return sum(abs(stage - zero) for _, stage in chain.allowed.fixed_zero)


def _ladder(task: Task, zero: int) -> Ladder:
    bounds = even_cuts(task.chain.block_works, shape_of(task.candidate, task.cluster).stages)
    alike = dict.fromkeys(_decisions(task.chain, zero, level) for level in RECOMPUTE_LEVELS)
    said = {each: _rung(task, bounds, each).prediction for each in alike}
    uniform = list[Decisions]()
    for each in sorted(said, key=lambda each: (said[each].step_s, said[each].peak_memory_bytes)):
        if not uniform or said[each].peak_memory_bytes < said[uniform[-1]].peak_memory_bytes:
            uniform.append(each)
    return Ladder(task, bounds, tuple(reversed(uniform)))


def _rung(task: Task, bounds: Sequence[int], decisions: Decisions) -> Rung:
    cuts = enumerate(itertools.pairwise(bounds))
    plan = task.plan(tuple(StagePlan(at, first, last, decisions[first:last]) for at, (first, last) in cuts))
    prediction = evaluate(plan, task.chain.costed, task.cluster, task.engine)
    return Rung(plan, prediction, task.cluster.chip.reserve_bytes)


def _decisions(chain: Chain, zero: int, level: Recompute) -> Decisions:
    """Of every block what is nearest to these."""
    costed, option, fixed = chain.costed, chain.option, dict(chain.allowed.fixed_zero)
    made = list[BlockDecision]()
    for at, block in enumerate(costed.graph.blocks):
        levels, stages = chain.allowed.of_block(at)
        places = [RECOMPUTE_LEVELS.index(each) for each in levels if each in costed.blocks[option][block.body]]
        own = (fixed[block.body],) if block.body in fixed else stages
        priced = [each for each in own if each in costed.states[option][block.body]]
        place = _nearest(places, RECOMPUTE_LEVELS.index(level))
        made.append(BlockDecision(_nearest(priced, zero), RECOMPUTE_LEVELS[place]))
    return tuple(made)


def _nearest(values: Sequence[int], goal: int) -> int:
    """The more thrifty where two are."""
    return min(values, key=lambda value: (abs(value - goal), -value))
