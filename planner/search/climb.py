"""An early plan that is hard to beat: from candidate to neighbouring candidate, as long as plans get quicker.

Bounds say which candidates can be good, not which are. What the search must not look at closely is decided by the best plan so
far, so it goes uphill first wherever it has found one: a probe (a plan with even cuts) costs a hundredth of a close look.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hardware_profiles import Cluster
from planner.ir.plan import AXIS_ORDERS, Mesh, Plan, Prediction
from planner.search.best import Best
from planner.search.candidates import Candidate
from planner.search.effort import has_time
from planner.search.families import Scope
from planner.search.meshes import practised
from planner.search.nodes import Sketch, count, count_roughly
from planner.search.request import as_it_is

AXES = ("pipeline", "data", "tensor")
FACTORS = (2, 3)
"""By so much a neighbour's degrees differ."""
OF_A_KIND = 4
"""Of neighbours that differ in virtual stages only, so many are probed."""

FEW_MOVES, MANY_MOVES = 4_000_000, 100_000_000
"""Actions of a schedule times moves of a block that are simulated at once near a plan: soon, and where a search takes long."""
STARTS, EACH = 6, 0.25
"""So many candidates of a mesh are probed for a plan to begin with, and a climb has this part of the time that is left."""


def nothing() -> bool:
    """Nothing else is to be done, whatever is found."""
    return False


@dataclass
class Climb:
    """``bounds``: of all candidates; ``best``: the best plan so far, which is told of those that climbs end with;
    ``meanwhile()``: is called before every step, and says whether nothing is left to look for; ``limit_s``: what is slower is
    not looked at closely, however quick the best is."""

    bounds: Mapping[Candidate, float]
    scope: Scope
    best: Best
    meanwhile: Callable[[], bool] = nothing
    limit_s: float = math.inf
    _probed: set[Candidate] = field(default_factory=set)
    _steps: list[tuple[Plan, Prediction]] = field(default_factory=list)
    _of_mesh: dict[Mesh, list[Candidate]] = field(default_factory=dict)
    _begun: frozenset[Mesh] = frozenset()

    def __post_init__(self) -> None:
        self._list(self.bounds)
        self._begun = frozenset(self._of_mesh)

    def add(self, bounds: Mapping[Candidate, float]) -> None:
        """Further candidates, of other meshes, to which a climb may come."""
        self.bounds = {**self.bounds, **bounds}
        self._list(bounds)

    def _list(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self._of_mesh.setdefault(candidate.mesh, []).append(candidate)

    @property
    def step_s(self) -> float:
        """Of the best plan so far, those on the way among them."""
        return min(self.best.step_s, self._steps[-1][1].step_s if self._steps else math.inf)

    @property
    def target_s(self) -> float:
        """What a plan must be quicker than to be a step uphill."""
        return self.step_s * (1 - self.best.gap)

    def practised(self, deadline: float = math.inf) -> list[Candidate]:
        """What practice begins with, for each number of pipeline ranks, of schedules for which there is time where there are
        some."""
        cluster, found = self.scope.cluster, dict[int, tuple[tuple[object, ...], Candidate]]()
        for mesh, members in sorted(self._of_mesh.items(), key=lambda pair: practised(cluster, pair[0]), reverse=True):
            known = found.get(mesh.pipeline)
            # Of a schedule for which there is time, and split better.
            if known is not None and known[0][0] and known[1].mesh.tensor != mesh.tensor:
                continue
            for candidate in members:
                key = has_time(candidate.actions, deadline), *_as_practised(cluster, candidate)
                if known is None or key >= known[0]:
                    known = key, candidate
            assert known is not None
            found[mesh.pipeline] = known
        return [candidate for _, candidate in found.values()]

    def begin(self, deadline: float) -> None:
        """Go uphill from the best of the candidate of the least bound and of what practice begins with, for each number of
        pipeline ranks: the widest tensor split inside the fastest links, the smallest micro-batch and the most virtual stages
        (Narayanan et al. 2021, section 3, takeaways); those first that look best."""
        chosen = dict.fromkeys([*self.practised(deadline), *sorted(self.bounds, key=self.bounds.__getitem__)[:1]])
        sketches = [Sketch(candidate, self.bounds[candidate]) for candidate in chosen]
        best: Candidate | None = None
        for sketch in sketches:
            self.meanwhile()
            count_roughly([sketch], self.scope)
        while sketches:
            first = min(sketches, key=lambda sketch: sketch.bound)
            if first.counted_s < self.target_s and first.bound < self.target_s:
                count([first], self.scope, self.target_s)
                continue
            sketches.remove(first)
            if first.bound < self.target_s and self._improves(first, deadline):
                best = first.candidate
        if best is not None:
            self.go(best, deadline)
            self._look_near(deadline, FEW_MOVES)

    def go(self, start: Candidate, deadline: float) -> None:
        """Go on from here to the first neighbour that is quicker than all before, until none is."""
        at: Candidate | None = start
        while at is not None:
            near = self._neighbours(at), self._restaged(at)
            found = self._quicker(at, near[0], deadline) or self._quicker(at, near[1], deadline)
            at = found and self._farther(at, found, deadline)
        self._arrive()

    def _farther(self, before: Candidate, at: Candidate, deadline: float) -> Candidate:
        """From a step to other virtual stages on, twice as far each time, as long as that is quicker."""
        alike = [other for other in self._of_mesh[at.mesh] if (other.micro, other.schedule) == (at.micro, at.schedule)]
        while before in alike:
            goal = at.virtual + 2 * (at.virtual - before.virtual)
            other = min(alike, key=lambda each: abs(each.virtual - goal))
            if other in self._probed or not self._improves(Sketch(other, self.bounds[other]), deadline):
                break
            before, at = at, other
        return at

    def widely(self, bounds: Mapping[Candidate, float], deadline: float) -> None:
        """In every mesh by itself (none that was added), of the candidates that have ``bounds``, the most promising mesh first:
        what is quicker elsewhere does not end these climbs. Then near the best plan, more thoroughly than before."""
        meshes = dict[Mesh, dict[Candidate, float]]()
        for candidate in sorted(bounds, key=bounds.__getitem__):
            if candidate.mesh in self._begun:
                meshes.setdefault(candidate.mesh, {})[candidate] = bounds[candidate]
        for members in meshes.values():
            target_s = self.best.target()
            quick = {candidate: bound for candidate, bound in members.items() if bound < target_s}
            now = time.perf_counter()
            if not quick or now > deadline:
                continue
            climb = Climb(quick, self.scope, Best(self.best.gap, as_it_is), self.meanwhile, target_s)
            climb._from_least(now + EACH * (deadline - now))
            if climb.best.found is not None:
                self.best.report(*climb.best.found)
        self._look_near(deadline, MANY_MOVES)

    def _from_least(self, deadline: float) -> None:
        """From the first of the least bounds that has a plan."""
        for candidate in list(self.bounds)[:STARTS]:
            if self._improves(Sketch(candidate, self.bounds[candidate]), deadline):
                self.go(candidate, deadline)
                return

    def _quicker(self, at: Candidate, near: Iterable[Candidate], deadline: float) -> Candidate | None:
        """The first that is quicker than all before."""
        fresh = (Sketch(each, self.bounds[each]) for each in self._nearest(at, set(near) - self._probed))
        return next((sketch.candidate for sketch in fresh if self._improves(sketch, deadline)), None)

    def _nearest(self, at: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
        """Of candidates that differ in virtual stages only, which are much alike, some with nearly as many as ``at``: the
        nearest of each kind first, those kinds first that look best."""
        kinds: dict[object, list[Candidate]] = {}
        for other in others:
            kinds.setdefault((other.mesh, other.micro, other.schedule), []).append(other)
        ranked = list[tuple[int, float, Candidate]]()
        for kind in kinds.values():
            kind.sort(key=lambda other: (abs(other.virtual - at.virtual), other.virtual))
            ranked += [(place, self.bounds[other], other) for place, other in enumerate(kind[:OF_A_KIND])]
        return [other for _, _, other in sorted(ranked, key=lambda each: each[:2])]

    def _look_near(self, deadline: float, moving: int) -> None:
        """Of the best plan and what differs from it in schedule and virtual stages only, plans with cuts near even ones; again
        from one that is quicker."""
        found, looked = None, set[Candidate]()
        while self.best.found is not None and self.best.found is not found:
            found = self.best.found
            plan, _ = found
            alike = [each for each in self._of_mesh[plan.mesh] if each.micro == plan.batch.micro]
            at = min(alike, key=lambda each: (each.schedule != plan.schedule.name, abs(each.virtual - plan.schedule.virtual)))
            for candidate in self._nearest(at, alike):
                if candidate not in looked:
                    looked.add(candidate)
                    self._improves(Sketch(candidate, self.bounds[candidate]), deadline, moving=moving)
            self._arrive()

    def _arrive(self) -> None:
        """The last plan of a climb that fits by a closer look. Those before it were only on the way: they are not looked at
        unless it does not fit."""
        while self._steps and not self.best.report(*self._steps.pop()).fits:
            pass
        self._steps.clear()

    def _step(self, plan: Plan, prediction: Prediction) -> Prediction:
        if prediction.step_s < self.step_s:
            self._steps.append((plan, prediction))
        return prediction

    def _improves(self, sketch: Sketch, deadline: float, *, moving: int = 0) -> bool:
        """Whether a probe of a candidate beats the best plan so far."""
        if sketch.bound >= self.target_s or time.perf_counter() > deadline:
            return False
        if math.isfinite(self.step_s) and not has_time(sketch.candidate.actions, deadline):
            return False
        if self.meanwhile():
            return False
        self._probed.add(sketch.candidate)
        before = self.target_s
        limit_s = min(before, self.limit_s)
        attempts, _ = sketch.attempts(self.scope, limit_s)
        best = min(attempts, key=lambda attempt: attempt.bound, default=None)
        if best is not None:
            best.probe(self._step, limit_s, moving=moving)
        return self.target_s < before

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Other schedules and virtual stages; the next micro-batches; a factor moved from one axis to another."""
        alike = self._of_mesh[candidate.mesh]
        yield from (other for other in alike if other.micro == candidate.micro)
        same = [other for other in alike if (other.schedule, other.virtual) == (candidate.schedule, candidate.virtual)]
        for side in (1, -1):
            beside = [other for other in same if side * (other.micro - candidate.micro) > 0]
            yield from sorted(beside, key=lambda other: abs(other.micro - candidate.micro))[:1]
        for other in self._with_factor_moved(candidate):
            alone = other.mesh.pipeline == 1 or candidate.mesh.pipeline == 1
            if alone or (other.schedule, other.virtual) == (candidate.schedule, candidate.virtual):
                yield other

    def _restaged(self, candidate: Candidate) -> Iterator[Candidate]:
        """A factor moved from one axis to another, as many stages as before in all."""
        stages = candidate.mesh.pipeline * candidate.virtual
        for other in self._with_factor_moved(candidate):
            if other.schedule == candidate.schedule and other.mesh.pipeline * other.virtual == stages:
                yield other

    def _with_factor_moved(self, candidate: Candidate) -> Iterator[Candidate]:
        """From one axis to another, micro-batches as large as before or as many."""
        for mesh in _moved(candidate.mesh):
            for other in self._of_mesh.get(mesh, ()):
                if other.micro == candidate.micro or other.accumulation == candidate.accumulation:
                    yield other


def _as_practised(cluster: Cluster, candidate: Candidate) -> tuple[object, ...]:
    """Grows with what practice prefers."""
    return practised(cluster, candidate.mesh), -candidate.micro, candidate.schedule == "interleaved-1f1b", candidate.virtual


def _moved(mesh: Mesh) -> Iterator[Mesh]:
    """Meshes in another order, or with a factor moved from one axis to another."""
    yield from (replace(mesh, order=order) for order in AXIS_ORDERS if order != mesh.order)
    degrees = {name: getattr(mesh, name) for name in AXES}
    for source in AXES:
        for goal in AXES:
            for factor in FACTORS:
                if source != goal and degrees[source] % factor == 0:
                    yield replace(mesh, **degrees | {source: degrees[source] // factor, goal: degrees[goal] * factor})
