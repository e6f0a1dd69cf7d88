"""Plans without a pipeline that may fit by a closer look alone: early ones, and where a search is over some more.

The search holds plans to sums that bound memory from above. Where a step has few micro-batches these can be an eighth above the
truth: gradients come as activations go, and what ZeRO 3 gathers is not the largest block twice. So every candidate without a
pipeline, of which there are few, gets a plan with the memory that there is, then with more, as much as a closer look leaves:
one of every mesh first, others while there is time. A plan that fits by that look only is no part of the space that the
certificate is about: where it stays the best, it is quicker than all that is.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.ir.plan import Mesh, Plan, Prediction
from planner.search.best import Best
from planner.search.candidates import Candidate
from planner.search.families import Scope
from planner.search.nodes import Attempt, Sketch
from planner.search.uniform import Ladder, Rung, ladders

WIDER, HALVINGS = 1.25, 5
"""Sums may be so many times the memory; where that is too much, so often half of the way between what is too much and what is
not."""
LASTS_S, PART = 1.0, 0.25
"""Seconds at most, and part of the time that is left, for what comes after the first of every mesh."""
PRICED_S = 2.0
"""Seconds at most for prices and sums of plans of one ZeRO stage."""


@dataclass(frozen=True)
class Beyond:
    """``bounds``: of all candidates' steps, whatever the memory; ``meanwhile()``: is called before every candidate."""

    bounds: Mapping[Candidate, float]
    scope: Scope
    best: Best
    meanwhile: Callable[[], object]

    def go(self, deadline: float) -> None:
        """Candidates of the least bounds first, as long as they may be quicker than the best plan: one of every mesh, however
        busy the machine is, then others for some time."""
        firsts, others = self._alone()
        for each in self._promising(firsts, deadline):
            self._stretch(each, deadline)
        until = _soon(deadline)
        for each in self._promising(others, until):
            self._stretch(each, until)

    def _alone(self) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates without a pipeline: the first of every mesh, and the others."""
        of_mesh = dict[Mesh, Candidate]()
        alone = sorted((each for each in self.bounds if each.mesh.pipeline == 1), key=self.bounds.__getitem__)
        for candidate in alone:
            of_mesh.setdefault(candidate.mesh, candidate)
        return list(of_mesh.values()), [each for each in alone if each is not of_mesh[each.mesh]]

    def _promising(self, candidates: Iterable[Candidate], until: float) -> Iterator[Candidate]:
        """One after the other while there is time and it may be quicker than the best plan so far."""
        for candidate in candidates:
            if self.bounds[candidate] >= self.best.target() or time.perf_counter() > until:
                return
            self.meanwhile()
            yield candidate

    @property
    def limit_bytes(self) -> int:
        """What a device has."""
        return self.scope.cluster.chip.memory_bytes

    def _stretch(self, candidate: Candidate, until: float) -> None:
        """Its plans within the memory by their sums, then within as much more as leaves a plan that fits."""
        least, most = float(self.limit_bytes), WIDER * self.limit_bytes
        self._fits(candidate, least)
        if self._fits(candidate, most) is not False:
            return
        for _ in range(HALVINGS):
            if time.perf_counter() > until:
                return
            middle = (least + most) / 2
            if self._fits(candidate, middle) is False:
                most = middle
            else:
                least = middle

    def _fits(self, candidate: Candidate, memory_bytes: float) -> bool | None:
        """Whether a plan whose sums are within so much memory fits by a closer look; None where none is quicker than the best.
        One that does is kept."""
        closer = _Closer(self.best, self.limit_bytes)
        for attempt in sorted(self._attempts(candidate, memory_bytes), key=lambda attempt: attempt.bound)[:1]:
            attempt.probe(closer, self.best.target())
        return closer.fits

    def _attempts(self, candidate: Candidate, memory_bytes: float) -> list[Attempt]:
        """Its chains that may have a plan quicker than the best one whose sums are within so much memory."""
        cluster = self.scope.cluster
        chip = replace(cluster.chip, memory_bytes=round(memory_bytes))
        scope = replace(self.scope, cluster=replace(cluster, chip=chip))
        attempts, _ = Sketch(candidate, self.bounds[candidate]).attempts(scope, self.best.target())
        return attempts

    def finish(self, deadline: float) -> None:
        """Where a search is over before its time, plans of one ZeRO stage for all blocks (:mod:`uniform`): of the first of
        every mesh, and of others of meshes that are short of memory. Of every ladder first the plan of the least sums of those
        quicker than the best plan."""
        firsts, others = self._alone()
        until = _soon(deadline, PRICED_S)
        found = [ladder for each in self._promising(firsts, until) for ladder in self._ladders(each)]
        short = {ladder.task.candidate.mesh for ladder in found}
        more = self._promising([each for each in others if each.mesh in short], until)
        found += [ladder for each in more for ladder in self._ladders(each)]
        until = _soon(deadline)
        for _, ladder in sorted(((self._first(ladder)[1].sums_bytes, ladder) for ladder in found), key=lambda pair: pair[0]):
            if time.perf_counter() > until:
                return
            self._up(ladder, until)

    def _ladders(self, candidate: Candidate) -> list[Ladder]:
        """Those with a plan that may be quicker than the best one, fit by a closer look and not fit by its sums."""
        tasks = (
            replace(each, cluster=self.scope.cluster) for attempt in self._attempts(candidate, WIDER * self.limit_bytes)
            for task in attempt.tasks for each in task.each
        )
        beyond = (ladder for ladder in ladders(tasks) if ladder[-1].sums_bytes > self.limit_bytes)
        return [ladder for ladder in beyond if self._may_hold(self._first(ladder)[1])]

    def _first(self, ladder: Ladder) -> tuple[int, Rung]:
        """The lowest rung that is quicker than the best plan, else the highest."""
        target_s = self.best.target()
        at = bisect_left(range(len(ladder) - 1), True, key=lambda at: ladder[at].prediction.step_s < target_s)
        return at, ladder[at]

    def _may_hold(self, rung: Rung) -> bool:
        """Whether a plan may be quicker than the best one and fit by a closer look."""
        return rung.prediction.step_s < self.best.target() and rung.may_fit(self.limit_bytes, WIDER)

    def _holds(self, rung: Rung) -> bool:
        """Whether one does. If so it is kept."""
        return self._may_hold(rung) and self.best.report(rung.plan, rung.prediction).fits

    def _up(self, ladder: Ladder, until: float) -> None:
        """From the first rung that matters, if that fits by a closer look, to the last that does."""
        least, rung = self._first(ladder)
        most = len(ladder) if self._holds(rung) else least
        while most - least > 1 and time.perf_counter() < until:
            middle = (least + most) // 2
            if self._holds(ladder[middle]):
                least = middle
            else:
                most = middle


def _soon(deadline: float, lasts_s: float = LASTS_S) -> float:
    """When what is done beside the first of every mesh ends."""
    now = time.perf_counter()
    return now + min(lasts_s, PART * (deadline - now))


@dataclass
class _Closer:
    """A look at what is quicker than the best plan, under the memory that there is. ``fits``: whether one of them fits."""

    best: Best
    limit_bytes: int
    fits: bool | None = None

    def __call__(self, plan: Plan, prediction: Prediction) -> Prediction:
        if prediction.step_s >= self.best.step_s:
            return prediction
        seen = self.best.report(plan, replace(prediction, memory_limit_bytes=self.limit_bytes))
        self.fits = bool(self.fits or seen.fits)
        return seen
