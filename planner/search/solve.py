"""Solving one candidate under one option of placements: from columns to a plan and a bound."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hardware_profiles import Cluster
from planner.evaluate import evaluate, send_seconds, sums_seconds, tied_parameters, tied_sum_seconds
from planner.ir.costed import CostedGraph
from planner.ir.placement import local_type
from planner.ir.plan import Batch, BlockDecision, Plan, Prediction, Schedule, StagePlan
from planner.search.candidates import Candidate, allowed_choices, shape_of
from planner.search.chain import THINNING, Allowed, Chain, Key
from planner.search.columns import Columns, OutOfTime, build_columns
from planner.search.even import even_choice
from planner.search.fluid import Fluid, Pool, stream_of
from planner.search.greedy import greedy_stages, rounded_cuts
from planner.search.master import FIRST_CUTS, Answer, Effort, Master, integers, relax
from planner.search.request import Request
from planner.search.tables import Floats, Pick


@dataclass(frozen=True)
class Fingerprints:
    """What the plan is made for."""

    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str


@dataclass(frozen=True)
class Task:
    """One candidate and one chain (option and tied ZeRO stage)."""

    candidate: Candidate
    chain: Chain
    cluster: Cluster
    request: Request
    names: Fingerprints

    def plan(self, stages: tuple[StagePlan, ...]) -> Plan:
        candidate, request, costed = self.candidate, self.request, self.chain.costed
        return Plan(
            self.names.model, self.names.model_fingerprint, self.names.cluster, self.names.cluster_fingerprint,
            request.precision, request.sequence, candidate.mesh,
            Batch(request.batch, candidate.micro, candidate.accumulation),
            Schedule(candidate.schedule, candidate.virtual), candidate.zero_group, stages,
            costed.placements[self.chain.option], optimizer=request.optimizer,
        )


def chains_of(costed: CostedGraph, candidate: Candidate, request: Request) -> tuple[Chain, ...]:
    """One chain for each option that the pins leave and each ZeRO stage that tied parameters can share."""
    allowed = allowed_choices(candidate, request.pins)
    wanted = request.pins.sequence_parallel
    options = [
        index for index, placements in enumerate(costed.placements)
        if wanted is None or wanted == any(p.inputs and p.inputs[0].state == "shard" for p in placements.values())
    ]
    return tuple(
        Chain(costed, option, replace(allowed, fixed_zero=fixed))
        for option in options for fixed in _tied_stages(costed, option, allowed)
    )


def _tied_stages(costed: CostedGraph, option: int, allowed: Allowed) -> list[tuple[tuple[str, int], ...]]:
    """Assignments of ZeRO stages to bodies that share parameters, without those that another beats in all."""
    graph = costed.graph
    groups: list[set[str]] = []
    for _, owners in tied_parameters(graph):
        bodies = {graph.blocks[index].body for index in owners}
        touching = [group for group in groups if group & bodies]
        groups = [group for group in groups if not group & bodies] + [bodies.union(*touching)]
    assignments: list[tuple[tuple[str, int], ...]] = [()]
    for group in groups:
        stages: list[int] = []
        vectors = {zero: _state_vector(costed, option, group, zero) for zero in allowed.zero}
        for zero, vector in vectors.items():
            beaten = any(
                all(a <= b for a, b in zip(other, vector, strict=True)) and (other != vector or rival < zero)
                for rival, other in vectors.items() if rival != zero
            )
            if not beaten:
                stages.append(zero)
        assignments = [
            (*known, *((body, zero) for body in sorted(group))) for known, zero in itertools.product(assignments, stages)
        ]
    return assignments


def _state_vector(costed: CostedGraph, option: int, bodies: set[str], zero: int) -> tuple[float, ...]:
    states = [costed.states[option][body][zero] for body in sorted(bodies)]
    return tuple(
        value for s in states for value in (
            s.parameters_bytes + s.gradients_bytes + s.optimizer_bytes, s.gather_bytes, s.forward_comm_s, s.backward_comm_s,
            s.once_comm_s + s.optimizer_s,
            # The sum of tied gradients over stages moves one shard from ZeRO 1 on.
            1.0 if zero == 0 else 0.0,
        )
    )


FLUID_ROUNDS = 4
INTEGER_S = (2.0, 8.0, 32.0)
"""Seconds of integer solving in the successive visits of one task."""


@dataclass
class Attempt:
    """One task under way. Each visit looks more closely, so that no task holds up the others: first its columns, an even
    plan and a few cuts; then all cuts of the LP; then integers, for longer and longer. ``bound`` is always valid."""

    task: Task
    bound: float
    pool: Pool
    flowed: bool = False
    visits: int = 0
    limit_s: float = 0.0
    master: Master | None = None
    relaxed: Answer | None = None

    @cached_property
    def tied_s(self) -> float:
        """Seconds of summing tied gradients, wherever the cuts are."""
        return _certain_tied_seconds(self.task)

    def advance(self, effort: Effort, best_s: float, report: Callable[[Plan, Prediction], None]) -> bool:
        """One visit. Returns whether nothing more can be learned here."""
        tied_s = self.tied_s
        if not self.flowed:
            return self._flow(effort, best_s, report)
        if self.master is None:
            return self._begin(effort, best_s, tied_s, report)
        self.visits += 1
        worthless = best_s * (1 - effort.gap) - tied_s
        if self.visits == 1:
            self.relaxed = relax(self.master, effort, worthless)
            self._prove(self.relaxed.bound, tied_s)
            return self._over(self.relaxed.bound)
        assert self.relaxed is not None
        limit = INTEGER_S[min(self.visits - 2, len(INTEGER_S) - 1)]
        short = replace(effort, deadline=min(effort.deadline, time.perf_counter() + limit))
        judge = _Judge(self.task, self.master, best_s, tied_s, report)
        proven = integers(self.master, self.relaxed, short, best_s - tied_s, judge)
        self._prove(proven, tied_s)
        return self._over(proven) or self.visits > len(INTEGER_S)

    def _flow(self, effort: Effort, best_s: float, report: Callable[[Plan, Prediction], None]) -> bool:
        """The fluid bound, and a plan near its solution."""
        self.flowed = True
        task = self.task
        shape = shape_of(task.candidate, task.cluster)
        stream = stream_of(task.chain)
        send_s = send_seconds(task.cluster, task.candidate.mesh, stream.crossing_bytes)
        fluid = Fluid(stream, shape, send_s, self.pool)
        proven = fluid.solve(best_s * (1 - effort.gap) - self.tied_s, FLUID_ROUNDS)
        self.bound = max(self.bound, proven + self.tied_s)
        if math.isinf(self.bound):
            return True
        if self.bound < best_s:
            stages = greedy_stages(task.chain, shape, rounded_cuts(fluid.parts, stream.blocks))
            try_stages(task, stages, report)
        return False

    def _begin(
        self, effort: Effort, best_s: float, tied_s: float, report: Callable[[Plan, Prediction], None]
    ) -> bool:
        task = self.task
        known = best_s - tied_s if math.isfinite(best_s) else _first_limit(task)
        self.limit_s = max(known, 4 * self.limit_s)
        shape = shape_of(task.candidate, task.cluster)
        try:
            columns = build_columns(task.chain, shape, self.limit_s, effort.deadline)
        except OutOfTime:
            return False
        if columns is None:
            # Every plan has a stage that alone takes as long as the limit, or none fits.
            self.bound = math.inf if _complete(task, self.limit_s) else max(self.bound, self.limit_s + tied_s)
            return math.isinf(self.bound) or self.bound >= best_s
        sends = [send_seconds(task.cluster, task.candidate.mesh, run.crossing_bytes) for run in task.chain.runs]
        self.master = Master(task.chain, shape, columns, sends)
        weights = even_choice(self.master)
        if weights is not None:
            best_s = _Judge(task, self.master, best_s, tied_s, report)(weights) + tied_s
        relaxed = relax(self.master, replace(effort, cuts=FIRST_CUTS), best_s * (1 - effort.gap) - tied_s)
        self._prove(relaxed.bound, tied_s)
        return self._over(relaxed.bound)

    def _prove(self, pipeline_s: float, tied_s: float) -> None:
        """Raise the bound by what was proven over the columns, as far as those left out allow."""
        proven = pipeline_s * (1 - THINNING)
        if not _complete(self.task, self.limit_s):
            proven = min(proven, self.limit_s)
        self.bound = max(self.bound, proven + tied_s)

    def _over(self, proven: float) -> bool:
        """Whether the columns are exhausted; those left out get their turn under a higher limit."""
        if math.isinf(proven) and not _complete(self.task, self.limit_s):
            self.master, self.visits = None, 0
            return False
        return math.isinf(proven)


def try_stages(
    task: Task, stages: tuple[StagePlan, ...] | None, report: Callable[[Plan, Prediction], None]
) -> bool:
    """Evaluate stages, where there are any, and report what fits. Returns whether it does."""
    if stages is None:
        return False
    plan = task.plan(stages)
    prediction = evaluate(plan, task.chain.costed, task.cluster)
    if prediction.fits:
        report(plan, prediction)
    return prediction.fits


@dataclass
class _Judge:
    """Evaluates choices of columns and reports what fits. Returns the best step so far, tied sums left out."""

    task: Task
    master: Master
    best_s: float
    tied_s: float
    report: Callable[[Plan, Prediction], None]

    def __call__(self, weights: Floats) -> float:
        chain, columns = self.task.chain, self.master.columns
        plan = self.task.plan(expand(chain, self.master.shape.stages, columns, weights))
        prediction = evaluate(plan, chain.costed, self.task.cluster)
        if prediction.fits and prediction.step_s < self.best_s:
            self.best_s = prediction.step_s
            self.report(plan, prediction)
        return self.best_s - self.tied_s


def _complete(task: Task, limit: float) -> bool:
    """Whether no column is left out under this limit."""
    chain = task.chain
    return limit > task.candidate.accumulation * chain.least_work(tuple(run.count for run in chain.runs))


def _first_limit(task: Task) -> float:
    """A step that plans should not need: columns that are slower are left out at first."""
    chain, shape = task.chain, shape_of(task.candidate, task.cluster)
    total = chain.least_work(tuple(run.count for run in chain.runs)) + shape.stages * chain.costed.context_s
    largest = max(least[0] for least in chain.least)
    slowest = max(total / shape.pipeline, largest)
    return 1.5 * (shape.microbatches + shape.pipeline) * slowest + sum(
        run.count * least[1] for run, least in zip(chain.runs, chain.least, strict=True)
    )


def expand(chain: Chain, stages: int, columns: Columns, weights: Floats) -> tuple[StagePlan, ...]:
    """The stages that chosen columns stand for: counted choices are dealt to the blocks in order."""
    result, first = [], 0
    for stage in range(stages):
        members = np.flatnonzero(columns.stage == stage)
        column = members[np.argmax(weights[members])]
        key: Key = columns.keys[int(columns.source[column])]
        recompute, zero = chain.tables(key)
        order = chain.pick_order(key)
        levels = dict(zip(order, recompute.picks[columns.row[column, 0]], strict=True))
        shards = dict(zip(order, zero.picks[columns.row[column, 1]], strict=True))
        decisions = [
            BlockDecision(z, r)
            for run in sorted(order) for z, r in zip(_dealt(shards[run]), _dealt(levels[run]), strict=True)
        ]
        result.append(StagePlan(stage, first, first + len(decisions), tuple(decisions)))
        first += len(decisions)
    return tuple(result)


def _dealt(pick: Pick) -> list[Any]:
    return [choice for choice, count in pick for _ in range(count)]


def _certain_tied_seconds(task: Task) -> float:
    """What is paid once a step wherever the cuts are: sums of single numbers, and of tied gradients where the first and
    the last block are on different ranks."""
    candidate, chain = task.candidate, task.chain
    graph, last = chain.costed.graph, len(chain.costed.graph.blocks) - 1
    shape = shape_of(candidate, task.cluster)
    ends = (0, shape.rank_of(shape.stages - 1))
    total = sums_seconds(task.cluster, candidate.mesh)
    for parameter, owners in tied_parameters(graph) if ends[0] != ends[1] else ():
        if owners != (0, last) or not parameter.trainable:
            continue
        block = graph.blocks[0]
        body = graph.body_of[block.body]
        local = next(name for name, bound in block.parameters if bound == parameter.fqn)
        index = [p.name for p in body.parameters].index(local)
        placement = chain.costed.placements[chain.option][body.name].parameters[index]
        elements = local_type(parameter.type, placement, candidate.mesh.tensor).elements()
        zero = dict(chain.allowed.fixed_zero)[block.body]
        total += tied_sum_seconds(
            task.cluster, candidate.mesh, task.request.precision, elements, zero, candidate.zero_group, ends
        )
    return total

