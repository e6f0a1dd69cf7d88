"""Early plans without a pipeline, those among them that fit by a closer look alone.

The search holds plans to sums that bound memory from above. Where a step has few micro-batches these can be an eighth above the
truth: gradients come as activations go, and what ZeRO 3 gathers is not the largest block twice. So every candidate without a
pipeline, of which there are few, gets a plan with the memory that there is, then with more, as much as a closer look leaves:
one of every mesh first, others while there is time. A plan that fits by that look only is no part of the space that the
certificate is about: where it stays the best, it is quicker than all that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.ir.plan import Mesh, Plan, Prediction
from planner.search.best import Best
from planner.search.candidates import Candidate
from planner.search.families import Scope
from planner.search.nodes import Sketch

WIDER, HALVINGS = 1.25, 5
"""Sums may be so many times the memory; where that is too much, so often half of the way between what is too much and what is
not."""
LASTS_S, PART = 1.0, 0.25
"""Seconds at most, and part of the time that is left, for what comes after the first of every mesh."""


@dataclass(frozen=True)
class Beyond:
    """``bounds``: of all candidates' steps, whatever the memory; ``meanwhile()``: is called before every candidate."""

    bounds: Mapping[Candidate, float]
    scope: Scope
    best: Best
    meanwhile: Callable[[], None]

    def go(self, deadline: float) -> None:
        """Candidates of the least bounds first, as long as they may be quicker than the best plan: one of every mesh, however
        busy the machine is, then others for some time."""
        alone = sorted((each for each in self.bounds if each.mesh.pipeline == 1), key=self.bounds.__getitem__)
        of_mesh = dict[Mesh, Candidate]()
        for candidate in alone:
            of_mesh.setdefault(candidate.mesh, candidate)
        self._try(list(of_mesh.values()), deadline)
        now = time.perf_counter()
        self._try([each for each in alone if each is not of_mesh[each.mesh]], now + min(LASTS_S, PART * (deadline - now)))

    def _try(self, candidates: Sequence[Candidate], until: float) -> None:
        for candidate in candidates:
            if self.bounds[candidate] >= self.best.target() or time.perf_counter() > until:
                return
            self.meanwhile()
            self._stretch(candidate, until)

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
        cluster = self.scope.cluster
        chip = replace(cluster.chip, memory_bytes=round(memory_bytes))
        scope = replace(self.scope, cluster=replace(cluster, chip=chip))
        attempts, _ = Sketch(candidate, self.bounds[candidate]).attempts(scope, self.best.target())
        closer = _Closer(self.best, self.limit_bytes)
        for attempt in sorted(attempts, key=lambda attempt: attempt.bound)[:1]:
            attempt.probe(closer, self.best.target())
        return closer.fits


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
