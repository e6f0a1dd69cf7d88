"""Why nothing fits, and what would help: each remedy is shown by a plan before it is named.

Single changes are tried from cheap to dear: a constraint left out, another batch, more nodes of the same kind, more memory
on every device. First by the plans of least memory under the change (:mod:`planner.trials`), of which one fits, or by their
sums none does; then, with the time that is left, by a search for a quicker one. What the time was too short to tell is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, inf, lcm

from hardware_profiles import Cluster
from planner.clusters import Resize, resized
from planner.constraints import Condition, Constraints, Limit, flag_of
from planner.constraints_conflicts import smallest_conflict
from planner.decisions import decisions_of
from planner.ir.errors import NoPlanFits, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.search import Request
from planner.search.meshes import divisors
from planner.search.prices import Prices
from planner.search.refusal import MemoryTooSmall, shortage, told
from planner.trials import Trial, all_candidates, fewest_nodes, searched, try_change

ENOUGH_S = 6.0
"""Seconds for all remedies, where the job's own time is over."""
LARGER_BATCHES = (2, 4, 8)
MOST_NODES = 64
"""So many times the cluster's nodes are tried at most."""
KINDS = ("constraint", "batch", "nodes", "memory")
"""Of changes, the cheapest first."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Undecided:
    """Changes of a kind, in words, of which the time was too short to tell whether a plan fits."""

    kind: str
    words: str


@dataclass(frozen=True)
class Remedy:
    """A single change under which a plan was found. ``flags``: how the command line says it; ``note``: what else is known;
    ``searched``: the plan is the best that a search found, not only one that fits."""

    kind: str
    flags: str
    prediction: Prediction
    note: str = ""
    searched: bool = False

    def __str__(self) -> str:
        words = {"constraint": "without", "batch": "with", "nodes": "with", "memory": "with"}[self.kind]
        seconds = self.prediction.step_s
        step = f"{'' if self.searched else 'at most '}{seconds:{'.3g' if seconds < 1000 else '.0f'}} s a step"
        return f"{words} {self.flags} ({step}, {told(self.prediction.peak_memory_bytes)}{self.note})"


@dataclass(frozen=True)
class Explanation:
    """Why nothing fits. ``limit_bytes``: of one device; ``needed_bytes``: of the plan that needs the least, as replayed;
    ``proven_bytes``: by its sums, which the replay may be below, no plan needs less; ``conflict``: constraints that leave no
    plan on this cluster, none of which can be left out (empty: no plan fits even without any); ``smallest``: whether it is
    proven that no smaller set conflicts; ``remedies``: cheapest first; ``undecided``: changes that the time was too short to
    tell of, with their kinds."""

    shortage: str
    limit_bytes: int
    needed_bytes: int
    proven_bytes: int
    conflict: tuple[str, ...]
    smallest: bool
    remedies: tuple[Remedy, ...]
    undecided: tuple[Undecided, ...] = ()

    @property
    def advice(self) -> str:
        """What would help, in a line."""
        proof = "" if self.smallest else " (fewer of them may)"
        head = f"these conflict with it{proof}: {' and '.join(self.conflict)}; " if self.conflict else ""
        untold = " or ".join(change.words for change in self.undecided)
        tail = f"; not found in the time given: {untold}" if untold else ""
        if not self.remedies:
            return f"{head}no single change that was tried makes a plan fit; try a smaller model, sequence or precision{tail}"
        first, *rest = self.remedies
        others = f"; or {' or '.join(str(remedy) for remedy in rest)}" if rest else ""
        known = all(KINDS.index(change.kind) > KINDS.index(first.kind) for change in self.undecided)
        return f"{head}{'cheapest' if known else 'a'} change that fits: {first}{others}{tail}"


@dataclass(frozen=True)
class _Change:
    """A change that is being tried. ``note`` of the plan found."""

    kind: str
    flags: str
    cluster: Cluster
    request: Request
    trial: Trial
    note: Callable[[Plan], str] = field(default=lambda plan: "")

    def remedy(self) -> Remedy:
        assert self.trial.found is not None
        plan, prediction = self.trial.found
        return Remedy(self.kind, self.flags, prediction, self.note(plan), self.trial.searched)


@dataclass(frozen=True)
class _Job:
    """What all remedies are about. ``prices``: what the search has priced."""

    graph: ModelGraph
    cluster: Cluster
    request: Request
    resize: Resize
    prices: Prices | None

    def tried(self, cluster: Cluster, request: Request, deadline: float) -> Trial:
        return try_change(self.graph, cluster, request, deadline, self.prices)


def explain(
    refusal: MemoryTooSmall, graph: ModelGraph, cluster: Cluster, request: Request, progress: Progress,
    resize: Resize = resized, deadline: float = inf,
) -> Explanation:
    """Find the conflict and the remedies. ``deadline`` (time.perf_counter): of the whole command; a few seconds more where it
    is over."""
    least = refusal.least
    progress("nothing fits; trying what would")
    begin = time.perf_counter()
    deadline = begin + ENOUGH_S if deadline == inf else max(deadline, begin + ENOUGH_S)
    job = _Job(graph, cluster, request, resize, refusal.prices)
    conflict, smallest = _conflict(job, _share(deadline, 4))
    changes: list[_Change] = []
    undecided: list[Undecided] = []
    for find, parts in ((_without, 3), (_batch, 3), (_nodes, 2)):
        found, untold = find(job, conflict, _share(deadline, parts))
        changes += found
        undecided += untold
    changes += _memory(job, refusal)
    last = len(changes)
    for at, change in enumerate(changes):
        until = _share(deadline, last - at)
        trial = searched(change.trial, graph, change.cluster, change.request, until, refusal.prices)
        changes[at] = replace(change, trial=trial)
    remedies = [change.remedy() for change in changes]
    remedies.sort(key=lambda remedy: (KINDS.index(remedy.kind), remedy.prediction.step_s))
    return Explanation(
        shortage(least), request.limited(cluster).chip.memory_bytes, least.thriftiest[1].peak_memory_bytes, least.bound_bytes,
        tuple(f"{flag_of(c)} {str(c)!r}" for c in conflict), smallest, tuple(remedies), tuple(undecided),
    )


def _share(deadline: float, parts: int) -> float:
    """When the next of so many parts of the time that is left has to end."""
    now = time.perf_counter()
    return now + max(0.0, deadline - now) / parts


_Found = tuple[list[_Change], list[Undecided]]
"""Changes that fit, and those that the time was too short to tell of: of the others it is known by the sums that none does."""


def _without(job: _Job, conflict: Sequence[Limit], deadline: float) -> _Found:
    """Each constraint of the conflict left out by itself (without any other the conflict stays)."""
    found, untold = list[_Change](), list[Undecided]()
    for at, limit in enumerate(conflict):
        changed = replace(job.request, constraints=job.request.constraints.without(limit))
        trial = job.tried(job.cluster, changed, _share(deadline, len(conflict) - at))
        flags = f"{flag_of(limit)} {str(limit)!r}"
        if trial.fits:
            found.append(_Change("constraint", flags, job.cluster, changed, trial, _taken(limit)))
        elif not trial.excluded:
            untold.append(Undecided("constraint", f"without {flags}"))
    return found, untold


def _taken(limit: Limit) -> Callable[[Plan], str]:
    """What the plan that was found takes instead."""
    if not isinstance(limit, Condition):
        return lambda plan: ""
    return lambda plan: f"; {limit.name}: {decisions_of(plan).get(limit.name, '?')}"


def _batch(job: _Job, conflict: Sequence[Limit], deadline: float) -> _Found:
    """A batch that the devices divide, or a larger one: more ways to part it, and micro-batches enough for a pipeline. None
    where the devices do not hold the state once."""
    if fewest_nodes(job.graph, job.cluster, job.request) > job.cluster.nodes:
        return [], []
    batch, untold = job.request.batch, list[Undecided]()
    larger = sorted({lcm(batch, job.cluster.devices), *(factor * batch for factor in LARGER_BATCHES)} - {batch})
    larger = [size for size in larger if size <= LARGER_BATCHES[-1] * batch]
    for at, size in enumerate(larger):
        changed = replace(job.request, batch=size)
        trial = job.tried(job.cluster, changed, _share(deadline, len(larger) - at))
        if trial.fits:
            return [_Change("batch", f"--batch {size}", job.cluster, changed, trial)], untold
        if not trial.excluded:
            untold.append(Undecided("batch", f"with --batch {size}"))
    return [], untold


def _nodes(job: _Job, conflict: Sequence[Limit], deadline: float) -> _Found:
    """The fewest nodes, by doubling the distance and bisection over node counts that leave candidates. Fewer than hold the
    state once are passed over without a look."""
    graph, cluster, request = job.graph, job.cluster, job.request
    most = MOST_NODES * cluster.nodes
    hopeless = fewest_nodes(graph, cluster, request) - 1
    below, proven = max(cluster.nodes, hopeless), True
    reach, known = below + 1, True
    fits: tuple[int, Cluster, Trial] | None = None
    while fits is None or fits[0] - below > 1:
        if fits is None:
            count = _next_mesh(job, reach, most)
        else:
            middle = (below + fits[0]) // 2
            count = _next_mesh(job, middle, fits[0] - 1) or _next_mesh(job, below + 1, middle - 1)
        if count is None or time.perf_counter() >= deadline:
            known = known and count is None
            break
        try:
            larger = job.resize(cluster, count, cluster.devices_per_node)
        except ProfileError:
            return [], []
        trial = job.tried(larger, request, _share(deadline, 3))
        if trial.fits:
            fits = count, larger, trial
        else:
            below, proven, reach = count, trial.excluded, 2 * count - cluster.nodes
            known = known and proven
    if fits is None:
        return [], [] if known else [Undecided("nodes", "with more nodes")]
    count, larger, trial = fits
    change = _Change("nodes", f"{count} nodes", larger, request, trial)
    if not (proven and known):
        return [change], [Undecided("nodes", f"with fewer than {count} nodes")]
    fewest = f"; {below} {'is' if below == 1 else 'are'} too few{'' if below <= hopeless else ' by the sums of memory'}"
    return [replace(change, note=lambda plan: fewest)], []


def _next_mesh(job: _Job, first: int, last: int) -> int | None:
    """The fewest nodes from ``first`` on with any mesh that divides the batch and keeps to the constraints on its degrees."""
    per_node = job.cluster.devices_per_node
    return next((count for count in range(first, last + 1) if _has_mesh(job, count * per_node)), None)


def _has_mesh(job: _Job, devices: int) -> bool:
    admits, batch = job.request.constraints.admits, job.request.batch
    for pipeline in range(1, min(len(job.graph.blocks), devices) + 1):
        if devices % pipeline or not admits("pipeline", pipeline):
            continue
        for data in divisors(gcd(devices // pipeline, batch)):
            if admits("data", data) and admits("tensor", devices // pipeline // data):
                return True
    return False


def _memory(job: _Job, refusal: MemoryTooSmall) -> list[_Change]:
    """Devices with as much memory as the plan of least memory needs as replayed, which is that plan's own proof."""
    plan, prediction = refusal.least.thriftiest
    cluster, request, needed = job.cluster, job.request, prediction.peak_memory_bytes
    head = request.constraints.headroom
    size = needed + cluster.chip.memory_bytes - request.limited(cluster).chip.memory_bytes
    if head is not None and head.part:
        size = round(needed / (1 - head.part)) + 2
    larger = replace(cluster, chip=replace(cluster.chip, memory_bytes=size))
    flags = f"devices of {told(size)} ({size - cluster.chip.memory_bytes} bytes more)"
    return [_Change("memory", flags, larger, request, Trial((plan, prediction)))]


def _conflict(job: _Job, deadline: float) -> tuple[tuple[Limit, ...], bool]:
    """The smallest set of constraints that conflicts with the memory of the cluster, and whether all was tried in time."""
    limits = job.request.constraints.limits
    if not limits:
        return (), True
    in_time, free = True, replace(job.request, constraints=Constraints())
    prices = Prices(job.graph, job.cluster, free, all_candidates(job.graph, job.cluster, job.request), known=job.prices)

    def possible(chosen: tuple[Limit, ...]) -> bool:
        nonlocal in_time
        changed = replace(job.request, constraints=Constraints.of(chosen))
        trial = try_change(job.graph, job.cluster, changed, deadline, prices)
        in_time = in_time and (trial.fits or trial.excluded)
        return not trial.excluded

    return smallest_conflict(limits, possible), in_time


def retold(explanation: Explanation) -> NoPlanFits:
    """The error that a user sees."""
    return NoPlanFits("memory", explanation.shortage, explanation.advice)


def words_of(explanations: Sequence[Remedy]) -> list[dict[str, object]]:
    """Remedies for JSON."""
    return [
        {"change": remedy.kind, "flags": remedy.flags, "step_s": remedy.prediction.step_s, "searched": remedy.searched,
         "peak_memory_bytes": remedy.prediction.peak_memory_bytes}
        for remedy in explanations
    ]
