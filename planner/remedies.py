"""Why nothing fits, and what would help: each remedy is tried by a search before it is named.

Single changes are tried from cheap to dear: a constraint left out, another batch, more nodes of the same kind, more memory
on every device. What is named was found to work: `shardwright plan` with that change writes a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from hardware_profiles import Cluster
from planner.clusters import Resize, resized
from planner.constraints import Constraints, Limit, flag_of
from planner.constraints_conflicts import smallest_conflict
from planner.fitting import fitted
from planner.ir.errors import NoPlanFits, PinError, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Prediction
from planner.ir.serialize import fingerprint
from planner.search import Request, search
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.least import LeastMemory
from planner.search.prices import Prices
from planner.search.refusal import GIB, MemoryTooSmall, shortage
from planner.search.solve import Fingerprints

TRIED_S = 3.0
"""Seconds of solving for one remedy."""
EACH_S = 10.0
"""Seconds for each kind of remedy."""
LARGER_BATCHES = (2, 4, 8)
MOST_NODES = 64
"""So many times the cluster's nodes are tried at most."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Remedy:
    """A single change under which a plan was found. ``flags``: how the command line says it; ``note``: what else is known."""

    kind: str
    flags: str
    prediction: Prediction
    note: str = ""

    def __str__(self) -> str:
        words = {"constraint": "without", "batch": "with", "nodes": "with", "memory": "with"}[self.kind]
        used = f"{self.prediction.step_s:.3g} s a step, {self.prediction.peak_memory_bytes / GIB:.2f} GiB"
        return f"{words} {self.flags} ({used}{self.note})"


@dataclass(frozen=True)
class Explanation:
    """Why nothing fits. ``limit_bytes``: of one device; ``needed_bytes``: of the plan that needs the least;
    ``proven_bytes``: no plan needs less; ``conflict``: constraints that leave no plan on this cluster, none of which can be
    left out (empty: no plan fits even without any); ``smallest``: whether it is proven that no smaller set conflicts;
    ``remedies``: cheapest first."""

    shortage: str
    limit_bytes: int
    needed_bytes: int
    proven_bytes: int
    conflict: tuple[str, ...]
    smallest: bool
    remedies: tuple[Remedy, ...]

    @property
    def advice(self) -> str:
        """What would help, in a line."""
        proof = "" if self.smallest else " (fewer of them may)"
        head = f"these conflict with it{proof}: {' and '.join(self.conflict)}; " if self.conflict else ""
        if not self.remedies:
            return f"{head}no single change that was tried makes a plan fit; try a smaller model, sequence or precision"
        others = f"; or {' or '.join(str(remedy) for remedy in self.remedies[1:])}" if self.remedies[1:] else ""
        return f"{head}cheapest change that fits: {self.remedies[0]}{others}"


def explain(
    refusal: MemoryTooSmall, graph: ModelGraph, cluster: Cluster, request: Request, progress: Progress,
    resize: Resize = resized,
) -> Explanation | None:
    """Find the conflict and the remedies; None where no candidate can be placed at all."""
    least = refusal.least
    if least is None:
        return None
    progress("nothing fits; trying what would")
    limit = request.limited(cluster).chip.memory_bytes
    conflict, smallest = _conflict(graph, cluster, request, time.perf_counter() + EACH_S)
    found = _without(graph, cluster, request, conflict, time.perf_counter() + EACH_S)
    found += _other_batch(graph, cluster, request, time.perf_counter() + EACH_S)
    found += _more_nodes(graph, cluster, request, time.perf_counter() + EACH_S, resize)
    found += _more_memory(graph, cluster, request, least.peak_bytes, time.perf_counter() + EACH_S)
    return Explanation(
        shortage(least), limit, least.peak_bytes, least.bound_bytes, tuple(f"{flag_of(c)} {str(c)!r}" for c in conflict),
        smallest, tuple(found),
    )


def attempt(graph: ModelGraph, cluster: Cluster, request: Request, deadline: float) -> Prediction | None:
    """What a search finds under a change; None where nothing fits or the time is over."""
    left = deadline - time.perf_counter()
    if left <= 0:
        return None
    try:
        short = replace(request, time_limit_s=min(TRIED_S, left), gap=max(request.gap, 0.01))
        return fitted(search, graph, cluster, short).prediction
    except (NoPlanFits, PinError, ProfileError):
        return None


def fits_in(
    graph: ModelGraph, cluster: Cluster, request: Request, deadline: float, prices: Prices | None = None
) -> bool | None:
    """Whether any plan fits, by the plan of least memory; None where the time was too short to tell. ``prices``: of the same
    cluster and of these candidates at least."""
    limited = request.limited(cluster)
    try:
        candidates = enumerate_candidates(graph, limited, request)
    except PinError:
        return False
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    enough = limited.chip.memory_bytes
    prices = Prices(graph, limited, request, candidates) if prices is None else prices
    least = LeastMemory(graph, candidates, prices, limited, request, names, deadline, enough=enough).run()
    if least is None:
        return False
    return True if least.peak_bytes <= enough else False if least.bound_bytes > enough else None


def _without(
    graph: ModelGraph, cluster: Cluster, request: Request, conflict: Sequence[Limit], deadline: float
) -> list[Remedy]:
    """Each constraint of the conflict left out by itself (without any other the conflict stays); the quickest plan first."""
    found = []
    for limit in conflict:
        changed = replace(request, constraints=request.constraints.without(limit))
        if fits_in(graph, cluster, changed, deadline) is False:
            continue
        prediction = attempt(graph, cluster, changed, max(deadline, time.perf_counter() + TRIED_S))
        if prediction is not None:
            found.append(Remedy("constraint", f"{flag_of(limit)} {str(limit)!r}", prediction))
    return sorted(found, key=lambda remedy: remedy.prediction.step_s)


def _other_batch(graph: ModelGraph, cluster: Cluster, request: Request, deadline: float) -> Iterator[Remedy]:
    """A batch that the devices divide, or a larger one: more ways to part it, and micro-batches enough for a pipeline."""
    whole = lcm(request.batch, cluster.devices)
    larger = sorted({whole, *(factor * request.batch for factor in LARGER_BATCHES)} - {request.batch})
    for batch in larger:
        if batch > LARGER_BATCHES[-1] * request.batch:
            continue
        changed = replace(request, batch=batch)
        if fits_in(graph, cluster, changed, deadline) is not True:
            continue
        prediction = attempt(graph, cluster, changed, max(deadline, time.perf_counter() + TRIED_S))
        if prediction is not None:
            yield Remedy("batch", f"--batch {batch}", prediction)
            return


def _more_nodes(
    graph: ModelGraph, cluster: Cluster, request: Request, deadline: float, resize: Resize
) -> Iterator[Remedy]:
    """The fewest nodes, by doubling and bisection over node counts that leave candidates."""
    def fits(nodes: int) -> bool:
        try:
            return fits_in(graph, resize(cluster, nodes, cluster.devices_per_node), request, deadline) is True
        except ProfileError:
            return False

    widest = cluster.levels[0].size if not request.constraints.on("tensor") else cluster.devices
    most = min(MOST_NODES * cluster.nodes, request.batch * len(graph.blocks) * widest // cluster.devices_per_node)
    counts = [count for count in range(cluster.nodes + 1, most + 1) if _has_mesh(graph, cluster, count, request, widest)]
    too_few, enough, step = -1, None, 0
    while counts and enough is None and time.perf_counter() < deadline:
        if fits(counts[step]):
            enough = step
        elif step == len(counts) - 1:
            return
        else:
            too_few, step = step, min(2 * step + 1, len(counts) - 1)
    while enough is not None and enough - too_few > 1 and time.perf_counter() < deadline:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if fits(counts[middle]) else (middle, enough)
    if enough is None:
        return
    larger = resize(cluster, counts[enough], cluster.devices_per_node)
    prediction = attempt(graph, larger, request, max(deadline, time.perf_counter() + TRIED_S))
    if prediction is not None:
        less = counts[too_few] if too_few >= 0 else cluster.nodes
        yield Remedy("nodes", f"{counts[enough]} nodes", prediction, f"; {less} {'is' if less == 1 else 'are'} too few")


def _has_mesh(graph: ModelGraph, cluster: Cluster, nodes: int, request: Request, widest: int) -> bool:
    """Whether any mesh of so many nodes divides the batch and keeps to the constraints on its degrees."""
    devices, admits = nodes * cluster.devices_per_node, request.constraints.admits
    for pipeline in range(1, min(len(graph.blocks), devices) + 1):
        if devices % pipeline or not admits("pipeline", pipeline):
            continue
        for tensor in range(1, widest + 1):
            data, left = divmod(devices // pipeline, tensor)
            if not left and data and request.batch % data == 0 and admits("tensor", tensor) and admits("data", data):
                return True
    return False


def _more_memory(
    graph: ModelGraph, cluster: Cluster, request: Request, needed: int, deadline: float
) -> Iterator[Remedy]:
    """Devices with as much memory as the plan of least memory needs."""
    free = cluster.chip.memory_bytes - request.limited(cluster).chip.memory_bytes
    larger = replace(cluster, chip=replace(cluster.chip, memory_bytes=needed + free))
    if request.constraints.headroom is not None and request.constraints.headroom.part:
        part = request.constraints.headroom.part
        larger = replace(cluster, chip=replace(cluster.chip, memory_bytes=round(needed / (1 - part)) + 2))
    prediction = attempt(graph, larger, request, max(deadline, time.perf_counter() + TRIED_S))
    if prediction is not None:
        size = larger.chip.memory_bytes
        yield Remedy("memory", f"devices of {size / GIB:.2f} GiB ({size - cluster.chip.memory_bytes} bytes more)", prediction)


def _conflict(
    graph: ModelGraph, cluster: Cluster, request: Request, deadline: float
) -> tuple[tuple[Limit, ...], bool]:
    """The smallest set of constraints that conflicts with the memory of the cluster, and whether all was tried in time."""
    in_time, free = True, replace(request, constraints=Constraints())
    prices = Prices(graph, cluster, free, _all_candidates(graph, cluster, request))

    def possible(limits: tuple[Limit, ...]) -> bool:
        nonlocal in_time
        if time.perf_counter() > deadline:
            in_time = False
            return True
        known = fits_in(graph, cluster, replace(request, constraints=Constraints.of(limits)), deadline, prices)
        in_time = in_time and known is not None
        return known is not False

    conflict = smallest_conflict(request.constraints.limits, possible) if request.constraints.limits else ()
    return conflict, in_time


def _all_candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> list[Candidate]:
    """Those that are left without any constraint, and those under all of them (which may speak of more degrees)."""
    found = []
    for constraints in (Constraints(), request.constraints):
        try:
            found += enumerate_candidates(graph, cluster, replace(request, constraints=constraints))
        except PinError:
            continue
    return list(dict.fromkeys(found))


def retold(explanation: Explanation | None, refusal: MemoryTooSmall) -> NoPlanFits:
    """The error that a user sees."""
    if explanation is None:
        return NoPlanFits(refusal.where, refusal.wrong, refusal.right)
    return NoPlanFits("memory", explanation.shortage, explanation.advice)


def words_of(explanations: Sequence[Remedy]) -> list[dict[str, object]]:
    """Remedies for JSON."""
    return [
        {"change": remedy.kind, "flags": remedy.flags, "step_s": remedy.prediction.step_s,
         "peak_memory_bytes": remedy.prediction.peak_memory_bytes}
        for remedy in explanations
    ]
