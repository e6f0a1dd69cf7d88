"""What the search looks at: candidates, then the chains of the promising ones, ever more closely."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner.ir.plan import SPLIT_BACKWARD, Prediction, StagePlan
from planner.search.allowed import ONCE
from planner.search.branches import Branches
from planner.search.candidates import Candidate, shape_of
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.cuts import WORTH_MOVING, Cuts, Cutter
from planner.search.effort import Effort
from planner.search.families import Bundle, Counted, Scope
from planner.search.greedy import even_cuts, rounded_cuts
from planner.search.mixtures import grains, mixing_seconds
from planner.search.patterns import Patterns
from planner.search.request import Look
from planner.search.solve import Task, certain_tied_seconds, try_stages

FIRST_SLICE_S = 0.15
"""Seconds of the first look at branches; each further look may take twice as long."""
SOON_S = 1.0
"""A mixture of paths that takes no longer than this belongs to the first look, which lasts as much longer."""
FRUITLESS, SELDOM = 8, 4
"""After so many solutions whose plans were no better, a plan is made of every fourth only."""
WORTH_REGROUPING = 1.02
"""A plan that is no slower than this many times the target is tried under all ZeRO groups."""
REPEATS = 4
"""So often a solution that does not fit after all is sought again with less memory."""


@dataclass
class Sketch:
    """A candidate whose chains are not told apart yet. ``bound``: of its step; ``chains``: what counting knows of them, where
    it has counted, no closer than a target asked for that was ``counted_s``; ``rough``: whether it was counted before they were
    priced."""

    candidate: Candidate
    bound: float
    counted_s: float = -math.inf
    chains: tuple[Counted, ...] = ()
    rough: bool = False

    def attempts(self, scope: Scope, target_s: float = math.inf) -> tuple[list[Attempt], float]:
        """Its chains that may be quicker than the target, those that are alike as one; and the least step of the others."""
        if self.counted_s < target_s:
            count([self], scope, target_s)
        # Where its chains are not known, none of them may be quicker.
        found, others_s = list[Attempt](), math.inf if self.chains else self.bound
        for chains in self.chains:
            bound = max(self.bound, chains.bound)
            if bound < target_s:
                found.append(Attempt.of(self.candidate, scope, chains.bundle, bound, chains.ranks))
            else:
                others_s = min(others_s, bound)
        return found, others_s


def count(sketches: Iterable[Sketch], scope: Scope, target_s: float = math.inf) -> None:
    """Bound sketches by their chains, all of a family at once: infinite where there are none, and no closer than the target
    asks for: of most, what is known before their chains are priced is enough."""
    for members in _families(sketches, scope):
        for sketch in members:
            sketch.chains, sketch.counted_s = (), target_s
        if math.isfinite(target_s):
            _roughly(members, scope, target_s)
        near = [sketch for sketch in members if sketch.bound < target_s]
        if near:
            _closely(near, scope, target_s)


def count_roughly(sketches: Iterable[Sketch], scope: Scope) -> None:
    """Bound sketches, all of a family at once, as far as is known before their chains are priced."""
    for members in _families(sketches, scope):
        _roughly(members, scope, math.inf)


def _families(sketches: Iterable[Sketch], scope: Scope) -> Iterable[list[Sketch]]:
    found: dict[object, list[Sketch]] = {}
    for sketch in sketches:
        found.setdefault(scope.kin(sketch.candidate), []).append(sketch)
    return found.values()


def _roughly(sketches: list[Sketch], scope: Scope, target_s: float) -> None:
    """Bound sketches of a family before its chains are known, where that was not done yet."""
    fresh = [sketch for sketch in sketches if not sketch.rough]
    for sketch in fresh:
        sketch.rough = True
    bundle = scope.rough(fresh[0].candidate) if fresh else None
    if bundle is not None:
        shapes = [shape_of(sketch.candidate, scope.cluster) for sketch in fresh]
        for sketch, bound in zip(fresh, bundle.bounds(shapes, target_s).tolist(), strict=True):
            sketch.bound = max(sketch.bound, bound)


def _closely(sketches: list[Sketch], scope: Scope, target_s: float) -> None:
    """Bound sketches of a family by its chains."""
    family = scope.family(sketches[0].candidate)
    shapes = [shape_of(sketch.candidate, scope.cluster) for sketch in sketches]
    rows = [] if family is None else [bundle.counted(shapes, target_s) for bundle in family.alike]
    for at, sketch in enumerate(sketches):
        sketch.chains = tuple(row[at] for row in rows)
        sketch.bound = max(sketch.bound, min((chains.bound for chains in sketch.chains), default=math.inf))


@dataclass
class Kin:
    """Candidates that share mesh, micro-batch and ZeRO groups, and with them most of what counting needs; none of them counted.
    ``sketches``: by bound."""

    sketches: tuple[Sketch, ...]

    @property
    def bound(self) -> float:
        return self.sketches[0].bound

    @property
    def candidate(self) -> Candidate:
        return self.sketches[0].candidate

    @property
    def rough(self) -> bool:
        """Whether it was counted before its chains were priced."""
        return all(sketch.rough for sketch in self.sketches)

    def count(self, scope: Scope, target_s: float) -> None:
        """Count those that may be quicker than the target; the others are bounded well enough. Without a target, first as far
        as is known before their chains are priced."""
        if math.isfinite(target_s) or self.rough:
            count([sketch for sketch in self.sketches if sketch.bound < target_s], scope, target_s)
        else:
            count_roughly(self.sketches, scope)


def kin_of(sketches: Iterable[Sketch]) -> list[Kin]:
    """Sketches with their kin, by the lowest bound."""
    found: dict[object, list[Sketch]] = {}
    for sketch in sorted(sketches, key=lambda sketch: sketch.bound):
        candidate = sketch.candidate
        groups = candidate.zero_groups, candidate.once_groups
        key = candidate.mesh, candidate.micro, groups, candidate.schedule in SPLIT_BACKWARD
        found.setdefault(key, []).append(sketch)
    return [Kin(tuple(members)) for members in found.values()]


@dataclass
class Attempt:
    """A chain of a candidate under way, or several, or several ZeRO groups, as one: first its relaxation, then branches of it.
    ``bound`` of its step is always valid. ``mixed``: a solution has choices that may be no one chain's; they have to be told
    apart. ``whole``: it is no part of another, and was not looked at elsewhere before."""

    tasks: tuple[Task, ...]
    counts: Counts
    bound: float
    slice_s: float = FIRST_SLICE_S
    branches: Branches | None = None
    looks: int = 0
    mixed: bool = False
    whole: bool = True
    _tried: set[Cuts] = field(default_factory=set)
    _fruitless: int = 0

    @staticmethod
    def of(candidate: Candidate, scope: Scope, bundle: Bundle, bound: float, known: Ranks | None = None) -> Attempt:
        """The chains of a bundle; nothing is quicker than ``bound``. ``known``: their ranks, where they are known already."""
        chains = sorted(bundle.chains, key=lambda chain: sum(chain.block_works))
        tasks = tuple(Task(candidate, chain, scope.cluster, scope.request, scope.names) for chain in chains)
        ranks = known or Ranks(bundle.stream, shape_of(candidate, scope.cluster), bundle.works)
        mixing_s = mixing_seconds(ranks.shape, grains(ranks.shape)[0])
        first_s = FIRST_SLICE_S + (mixing_s if mixing_s < SOON_S else 0.0)
        return Attempt(tasks, Counts(ranks, scope.pool, bound=ranks.costs.bound), bound, first_s)

    def __post_init__(self) -> None:
        self.bound = max(self.bound, self.counts.bound + self.tied_s)

    def part(self, target_s: float) -> Attempt | None:
        """Give away half of its open branches, as an attempt; None where there is nothing to share."""
        given = () if self.branches is None else self.branches.part(target_s - self.tied_s)
        if not given:
            return None
        counts = Counts(self.counts.ranks, self.counts.pool, bound=min(branch.bound for branch in given))
        return Attempt(self.tasks, counts, counts.bound + self.tied_s, self.slice_s, Branches(counts, given), whole=False)

    @property
    def movable(self) -> bool:
        """Whether little is lost where it is gone on with elsewhere."""
        return not self.looks or self.branches is None or self.branches.movable

    def apart(self, scope: Scope) -> list[Attempt]:
        """An attempt for each of its chains, or ZeRO groups."""
        family = scope.family(self.candidate)
        assert family is not None
        bundles = family.apart([task.chain for task in self.tasks])
        return [Attempt.of(self.candidate, scope, bundle, self.bound) for bundle in bundles]

    def probe(self, report: Look, target_s: float, *, moving: int = 0) -> None:
        """Plans with even cuts, where they can be quicker than the target: of equal stages, and of equal ranks; or with cuts
        near the best of them, where ``moving`` blocks between stages simulates so many actions at a time at most."""
        patterns = self.patterns
        self._cut([even_cuts(self.tasks[0].chain.block_works, self.counts.shape.stages)], report, target_s, moving=moving)
        if patterns.possible:
            self._cut([patterns.cuts(counts) for counts in patterns.even()], report, target_s, moving=moving)

    @property
    def candidate(self) -> Candidate:
        return self.tasks[0].candidate

    @cached_property
    def patterns(self) -> Patterns:
        """What its chains have in common of whole blocks."""
        return Patterns(self.counts.ranks)

    @cached_property
    def tied_s(self) -> float:
        """Seconds of summing tied gradients, wherever the cuts are, at least."""
        return min(map(certain_tied_seconds, self.tasks))

    def advance(self, target: Callable[[], float], deadline: float, gap: float, report: Look) -> bool:
        """One look. ``target()``: what a plan must be quicker than to matter. Returns whether nothing more can be learned."""
        self.looks += 1
        if self.branches is None:
            self.branches = Branches(self.counts)

        def found(counts: Counts) -> float:
            before_s = target()
            if counts.exact or self._fruitless < FRUITLESS or self._fruitless % SELDOM == 0:
                self._report(counts, report, target)
            self._fruitless = 0 if target() < before_s else self._fruitless + 1
            return -math.inf if self.mixed else target() - self.tied_s

        until = min(deadline, time.perf_counter() + self.slice_s)
        unfinished = self.branches.solve(Effort(target() - self.tied_s, until, gap=gap / 4, end=deadline), found)
        self.bound = max(self.bound, self.branches.bound + self.tied_s)
        self.slice_s *= 2
        return not unfinished

    def _report(self, counts: Counts, report: Look, target: Callable[[], float]) -> None:
        """The plan of a solution, or one near it; of several chains or groups, whether one may be quicker than the target."""
        if not counts.exact:
            self._cut([rounded_cuts(counts.counts, counts.stream.blocks)], report, target(), moving=0)
            return
        predictions = _try_each(self.tasks[0].each, counts.stages(), report) if len(self.tasks) == 1 else []
        if len(self.tasks) > 1 or len(self.tasks[0].chain.zero_groups) > 1:
            self.mixed |= counts.simulated_s + self.tied_s < target()
        elif not predictions[0].fits:
            counts.tighten(predictions[0].peak_memory_bytes - predictions[0].memory_limit_bytes)

    def _cut(self, cuts: Sequence[Cuts], report: Look, target_s: float, *, moving: int) -> None:
        """Plans with the best of these cuts, as far as they may be quicker than the target: for each ZeRO stage of tied
        parameters, of the quickest chain that has one."""
        patterns, limit_s = self.patterns, target_s - self.tied_s
        fresh = [each for each in dict.fromkeys(cuts) if each not in self._tried]
        if fresh and patterns.possible:
            worth_s = (WORTH_MOVING if moving else 1.0) * limit_s
            quicker = patterns.may_be_quicker(np.array([patterns.counts_of(each) for each in fresh]), worth_s)
            fresh = [each for each, may_be in zip(fresh, quicker, strict=True) if may_be]
        if not fresh:
            return
        self._tried.update(fresh)
        for stages in dict.fromkeys(task.chain.allowed.fixed_zero for task in self.tasks):
            for task in (task for task in self.tasks if task.chain.allowed.fixed_zero == stages):
                best = self._fits(task, fresh, report, limit_s, moving=moving)
                if best is not None:
                    fresh = [best]  # Which cuts are best hardly depends on the ZeRO stage of tied parameters.
                    break

    def _fits(self, task: Task, cuts: Sequence[Cuts], report: Look, limit_s: float, *, moving: int) -> Cuts | None:
        """The cuts of a plan that fits, which was told of."""
        shape = self.counts.shape
        for _ in range(REPEATS):
            first, *others = task.each
            best = Cutter(first.chain, shape, self.patterns).quickest(cuts, limit_s, moving=moving)
            if best is None:
                return None
            polish, bounds = best
            stages = polish.shares.stages(polish.counts, bounds)
            prediction = try_stages(first, stages, report)
            if prediction.fits:
                if prediction.step_s < WORTH_REGROUPING * limit_s:
                    _try_each(others, stages, report, first)
                return bounds
            excess = prediction.peak_memory_bytes - prediction.memory_limit_bytes
            shape = replace(shape, capacity_bytes=shape.capacity_bytes - excess)
        return None


def _try_each(
    tasks: Iterable[Task], stages: tuple[StagePlan, ...], report: Look, fits: Task | None = None
) -> list[Prediction]:
    """The same stages under several ZeRO groups, those that have all of their choices. Where these send once a step, groups
    differ in what that takes: the quickest first, as long as none fits. ``fits``: another one that does."""
    able = [task for task in tasks if task.has(stages)]
    if any(decision.zero not in ONCE for stage in stages for decision in stage.decisions):
        return [try_stages(task, stages, report) for task in able]
    limit_s, found = math.inf if fits is None else _once_s(fits, stages), list[Prediction]()
    for seconds, task in sorted(((_once_s(task, stages), task) for task in able), key=lambda pair: pair[0]):
        if seconds >= limit_s or (found and found[-1].fits):
            break
        found.append(try_stages(task, stages, report))
    return found


def _once_s(task: Task, stages: tuple[StagePlan, ...]) -> float:
    """What follows a step's passes, at least."""
    return task.once_s(stages) + certain_tied_seconds(task)
