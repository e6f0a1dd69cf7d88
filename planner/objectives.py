"""What `best` can mean beside the shortest step: the least memory, the fewest devices, the N best plans, the front between
time and memory. All of them ask the one search again under other limits, so every plan keeps its certificate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Context
from typing import Any

from hardware_profiles import Cluster
from planner.at_peak import at_peak_s
from planner.clusters import Resize, resized, sizes_up_to
from planner.distinct import essence, passed_over
from planner.evaluate import replayed
from planner.fitting import fitted
from planner.ir.errors import JobError, NoPlanFits, PinError
from planner.ir.graph import ModelGraph
from planner.ir.serialize import fingerprint
from planner.job import Objective
from planner.search import Certificate, Request, SearchResult
from planner.search.candidates import candidates_of, enumerate_candidates
from planner.search.least import Least, LeastMemory
from planner.search.prices import Prices
from planner.search.refusal import MemoryTooSmall, unplaceable
from planner.search.solve import Fingerprints
from planner.search.tensor_axes import apart_of
from planner.trials import fewest_devices

GIB = 2**30
LEAST_S = 20.0
"""Seconds for the proof of the least memory at most."""
NARROW = 0.01
"""Bisection over memory limits ends at this part of the limit, less what is reserved in any plan."""
MOST_STEPS = 10
FRONT = 6
"""Memory limits of a front, in equal ratios from the quickest plan's peak down to the least memory."""
SAME = 3
"""So many searches a plan of the best N at most: some find what only looks different."""
EARLY = 0.05
"""Within this part of the optimum a first search ends that is to tell whether a number of devices is enough."""
ROOM = 2**60
"""Bytes that no plan of a device takes."""
Progress = Callable[[str], None]
Solver = Callable[[ModelGraph, Cluster, Request, Progress], SearchResult]


@dataclass(frozen=True)
class Outcome:
    """The best plan, on ``cluster``, and others. ``facts``: what is known of the objective beside the plan, for JSON."""

    result: SearchResult
    cluster: Cluster
    alternatives: tuple[SearchResult, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def pursue(
    objective: Objective, graph: ModelGraph, cluster: Cluster, request: Request, solver: Solver, progress: Progress,
    resize: Resize = resized,
) -> Outcome:
    """Find the best plan in the sense of ``objective``. ``solver``: the search with its explanations. Raises NoPlanFits."""
    if objective.name == "devices":
        found = _fewest_devices(objective, graph, cluster, request, solver, progress, resize)
    elif objective.name == "memory":
        found = _least_memory(objective, graph, cluster, request, solver, progress)
    else:
        found = Outcome(solver(graph, cluster, request, progress), cluster)
    if objective.pareto:
        return _front(found, graph, request, progress)
    return _top(objective.top, found, graph, request, progress)


def told(result: SearchResult, cluster: Cluster, request: Request) -> SearchResult:
    """A result as a plan's files have it: its certificate names the constraints that it holds under, and its memory limit is
    the chip's own (the search saw what head-room and limits leave of it)."""
    return replace(
        result, certificate=replace(result.certificate, constraints=request.asked(cluster).written),
        prediction=replace(result.prediction, memory_limit_bytes=cluster.chip.memory_bytes),
    )


def _solve(graph: ModelGraph, cluster: Cluster, request: Request, known: Prices | None = None) -> SearchResult:
    """A search, with the prices of one before it. An asked limit of memory is kept as head-room is, by the replay: it stands in
    the plan's certificate, under which the plan is read again."""
    return told(fitted(graph, cluster, request, known=known), cluster, request)


def _or_none(graph: ModelGraph, cluster: Cluster, request: Request, known: Prices) -> SearchResult | None:
    """The same; None where no plan was found that fits."""
    try:
        return _solve(graph, cluster, request, known)
    except MemoryTooSmall:
        return None


def _least(graph: ModelGraph, cluster: Cluster, request: Request, known: Prices | None = None) -> tuple[Least, Prices]:
    """The plan of least memory, and what was priced to find it."""
    limited = request.limited(cluster)
    candidates = enumerate_candidates(graph, limited, request)
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    prices = Prices(graph, limited, request, candidates, known=known)
    least = LeastMemory(graph, candidates, prices, limited, request, names, time.perf_counter() + LEAST_S).run()
    if least is None:
        raise unplaceable(candidates, graph, request.constraints)
    return least, prices


def _within(graph: ModelGraph, cluster: Cluster, request: Request, least: Least, known: Prices) -> SearchResult:
    """The quickest plan of no more memory than the one of least memory, by its sums and by its replay, which may be a little
    more; that plan itself where the search finds no other in its time (and then nothing is proven of its step)."""
    prediction = replayed(least.prediction, least.plan, graph, cluster)
    limited = replace(request, memory_limit_bytes=max(least.peak_bytes, prediction.peak_memory_bytes))
    try:
        return _solve(graph, cluster, limited, known)
    except MemoryTooSmall:
        return told(SearchResult(least.plan, prediction, Certificate(0.0, 0, 0)), cluster, limited)


def _least_memory(
    objective: Objective, graph: ModelGraph, cluster: Cluster, request: Request, solver: Solver, progress: Progress
) -> Outcome:
    """Least memory, the quickest of such plans; or the least within a part of the best step, by bisection."""
    limit = request.limited(cluster).chip.memory_bytes
    least, prices = _least(graph, cluster, request)
    if least.peak_bytes > limit:
        return Outcome(solver(graph, cluster, request, progress), cluster)  # By its replay alone, or it says why not.
    progress(f"least memory: {least.peak_bytes / GIB:.3f} GiB")
    if objective.within is None:
        result = _within(graph, cluster, request, least, prices)
        known = {"least_memory_bytes": least.peak_bytes, "lower_bound_bytes": least.bound_bytes}
        return Outcome(result, cluster, facts=known)
    best = quickest = solver(graph, cluster, request, progress)
    allowed_s = quickest.prediction.step_s * (1 + objective.within)
    reserved = cluster.chip.reserve_bytes
    low, high, proven = least.peak_bytes, max(least.peak_bytes, quickest.prediction.peak_memory_bytes), least.bound_bytes
    for _ in range(MOST_STEPS):
        if high - low <= NARROW * (high - reserved):
            break
        middle = (low + high) // 2
        progress(f"within {objective.within:.0%}: trying {middle / GIB:.3f} GiB")
        found = _or_none(graph, cluster, replace(request, memory_limit_bytes=middle), prices)
        if found is not None and found.prediction.step_s <= allowed_s:
            best, high = found, middle
        else:
            low = middle
            if found is not None and found.lower_bound_s > allowed_s:
                proven = max(proven, middle)
    facts = {"lower_bound_bytes": proven, "within": objective.within, "best_step_s": quickest.prediction.step_s}
    return Outcome(best, cluster, facts=facts)


def _fewest_devices(
    objective: Objective, graph: ModelGraph, cluster: Cluster, request: Request, solver: Solver, progress: Progress,
    resize: Resize,
) -> Outcome:
    """The fewest devices whose best plan is quick enough. More devices are not always quicker (a number that divides nothing is
    slow), so sizes are looked at from the smallest on, and none beyond the answer.

    No plan computes faster than the chips' peak, so fewer devices than its FLOPs need in that time are excluded at once
    (:func:`at_peak_s`: the MFU counts FLOPs that causal attention skips); so are those that do not hold the state once, and
    those whose candidates' bounds are all too slow (:func:`_least_step`). Others are excluded by the bound of their own search;
    that nothing fits is known by sums alone, which are above what a step holds, and excludes nothing.
    """
    if objective.max_step_s is None and not request.sequence:
        raise JobError("--min-tokens-per-s", "the model's samples are no sequences of tokens", "give --max-step-s")
    limit_s = objective.max_step_s or request.batch * request.sequence / (objective.min_tokens_per_s or 1.0)
    device_s, fewest = at_peak_s(graph, cluster.chip, request.batch), fewest_devices(graph, cluster, request)
    bounds, slow, unproven = dict[int, float](), list[tuple[float, Cluster]](), list[int]()
    known: Prices | None = None
    for nodes, per_node in sizes_up_to(cluster):
        if nodes * per_node < fewest:
            continue
        part = resize(cluster, nodes, per_node)
        bounds[part.devices] = device_s / part.devices
        if bounds[part.devices] <= limit_s:
            least_s, known = _least_step(graph, part, request, limit_s, known)
            if least_s > limit_s:
                bounds[part.devices] = least_s
        if bounds[part.devices] > limit_s:
            continue
        progress(f"trying {nodes} x {per_node} devices")
        try:
            result = _below(limit_s, graph, part, request, known)
        except MemoryTooSmall:
            unproven.append(part.devices)
            continue
        except (NoPlanFits, PinError):
            bounds[part.devices] = math.inf
            continue
        if result.prediction.step_s <= limit_s:
            least = min(unproven, default=part.devices)
            facts = {"max_step_s": limit_s, "devices": part.devices, "devices_lower_bound": least}
            return Outcome(result, part, facts=facts)
        slow.append((result.prediction.step_s, part))
        bounds[part.devices] = max(bounds[part.devices], result.lower_bound_s)
        if bounds[part.devices] <= limit_s:
            unproven.append(part.devices)
    # Of the quickest size, or of that which may be, a search says how quick it is, or why it has no plan.
    _, part = min(slow, key=lambda each: each[0], default=(math.inf, _likeliest(bounds, cluster, resize)))
    best = solver(graph, part, request, progress)
    raise _too_slow(best, part, limit_s, cluster, min(bounds.values(), default=0.0))


def _likeliest(bounds: Mapping[int, float], cluster: Cluster, resize: Resize) -> Cluster:
    """The size of the least bound, the largest of such; all of the cluster where none can be."""
    sizes = {nodes * per_node: (nodes, per_node) for nodes, per_node in sizes_up_to(cluster)}
    devices = min(reversed(list(bounds)), key=bounds.__getitem__, default=cluster.devices)
    return cluster if bounds.get(devices, math.inf) == math.inf else resize(cluster, *sizes[devices])


def _least_step(
    graph: ModelGraph, cluster: Cluster, request: Request, limit_s: float, known: Prices | None
) -> tuple[float, Prices | None]:
    """Seconds that no plan goes below whatever memory it takes, in closed form, and what was priced for it, or something
    below the limit; infinite where constraints leave no candidate."""
    roomy = replace(cluster, chip=replace(cluster.chip, memory_bytes=ROOM))
    try:
        candidates = candidates_of(graph, roomy, request)
    except PinError:
        return math.inf, known
    prices = Prices(graph, roomy, request, candidates.kinds, known=known)
    least_s = min(prices.bound(candidate) for kind in candidates.nearest for candidate in kind.candidates)
    if least_s > limit_s:
        least_s = min([least_s, *(prices.bound_over(apart.axes) for apart in apart_of(candidates.apart, prices))])
    return least_s, prices


def _below(limit_s: float, graph: ModelGraph, cluster: Cluster, request: Request, known: Prices | None) -> SearchResult:
    """The best plan, where one takes at most ``limit_s``; else any. A search for such plans alone soon tells that none does."""
    found = _solve(graph, cluster, replace(request, gap=max(EARLY, request.gap), most_s=limit_s), known)
    if found.lower_bound_s > limit_s or request.gap >= EARLY:  # Else it knows to that part alone.
        return found
    closer = _solve(graph, cluster, request, found.prices)
    best = min(closer, found, key=lambda result: result.prediction.step_s)
    return _at_least(best, max(closer.lower_bound_s, found.lower_bound_s))


def _too_slow(result: SearchResult, on: Cluster, limit_s: float, cluster: Cluster, bound_s: float) -> NoPlanFits:
    wrong = (
        f"no plan was found that takes at most {limit_s:.6g} s a step on {cluster.devices} devices or fewer: the best on"
        f" {on.devices} takes {result.prediction.step_s:.6g} s, and none takes less than"
        f" {min(bound_s, result.lower_bound_s):.6g} s"
    )
    return NoPlanFits("--objective devices", wrong, f"allow {_rounded_up(result.prediction.step_s)} s, or give more nodes")


def _rounded_up(value: float) -> str:
    """Six digits, of no less: what is allowed so is allowed."""
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(value)):.6g}"


def _top(count: int, found: Outcome, graph: ModelGraph, request: Request, progress: Progress) -> Outcome:
    """The best plans that differ in mesh, micro-batch, schedule or ZeRO group: each is the best without those before it, and
    no bound of fewer plans is below one of more. What only looks different (:func:`essence`) is passed over. There are no more
    where the next search proves that it has none; one that ended for want of time does not."""
    if count == 1:
        return found
    others: list[SearchResult] = []
    without, last, seen = request, found.result, {essence(found.result.plan, found.cluster)}
    for _ in range(SAME * count):
        if len(others) == count - 1:
            break
        known = without.constraints
        passed = (each for each in passed_over(last.plan, found.cluster, request.constraints) if each not in known.forbidden)
        without = replace(without, constraints=known.with_(*passed))
        progress(f"looking for plan {len(others) + 2} of {count}")
        try:
            last = _at_least(_solve(graph, found.cluster, without, found.result.prices), last.lower_bound_s)
        except (NoPlanFits, PinError) as refusal:
            if isinstance(refusal, MemoryTooSmall) and not refusal.proven:
                break
            return _ordered(found, others, {**found.facts, "complete": True})
        if (alike := essence(last.plan, found.cluster)) not in seen:
            others.append(last)
        seen.add(alike)
    return _ordered(found, others, {**found.facts, "complete": False, "others_lower_bound_s": last.lower_bound_s})


def _at_least(result: SearchResult, bound_s: float) -> SearchResult:
    """The result with a bound that is known from a larger space."""
    bound_s = min(max(bound_s, result.lower_bound_s), result.prediction.step_s)
    return replace(result, certificate=replace(result.certificate, lower_bound_s=bound_s))


def _ordered(found: Outcome, others: Sequence[SearchResult], facts: Mapping[str, Any]) -> Outcome:
    """The quickest first, under the proof of the whole space: a search may leave a better plan within its gap to the next."""
    first, *rest = sorted((found.result, *others), key=lambda result: result.prediction.step_s)
    whole = found.result.certificate
    bound_s = min(whole.lower_bound_s, first.prediction.step_s)
    first = replace(first, certificate=replace(whole, lower_bound_s=bound_s))
    return replace(found, result=first, alternatives=tuple(rest), facts=facts)


def _front(found: Outcome, graph: ModelGraph, request: Request, progress: Progress) -> Outcome:
    """Plans none of which is beaten in both step and peak: the quickest under ever lower limits of memory."""
    least, prices = _least(graph, found.cluster, request, found.result.prices)
    peak = found.result.prediction.peak_memory_bytes
    results = [found.result]
    for step in range(1, FRONT + 1):
        limit = least.peak_bytes if step == FRONT else round(peak * (least.peak_bytes / peak) ** (step / FRONT))
        if results[-1].prediction.peak_memory_bytes <= limit:
            continue  # It is the quickest under this limit too.
        progress(f"front: at most {limit / GIB:.3f} GiB")
        if step == FRONT:
            lower: SearchResult | None = _within(graph, found.cluster, request, least, prices)
        else:
            lower = _or_none(graph, found.cluster, replace(request, memory_limit_bytes=limit), prices)
        if lower is not None:
            results.append(_at_least(lower, results[-1].lower_bound_s))
    kept: list[SearchResult] = []
    for result in sorted(results, key=lambda r: (r.prediction.step_s, r.prediction.peak_memory_bytes)):
        if not kept or result.prediction.peak_memory_bytes < kept[-1].prediction.peak_memory_bytes:
            kept.append(result)
    facts = {**found.facts, "least_memory_bytes": least.peak_bytes, "lower_bound_bytes": least.bound_bytes}
    return Outcome(kept[0], found.cluster, tuple(kept[1:]), facts)
