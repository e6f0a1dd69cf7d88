"""Whether a changed job fits in memory: by a plan of it that fits, or because by the sums of memory none does."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_models.memory import MASTER_BYTES, MOMENTS
from hardware_profiles import Cluster
from planner.constraints import Constraints
from planner.evaluate import replayed
from planner.fitting import fitted
from planner.ir.errors import NoPlanFits, PinError, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.ir.serialize import fingerprint
from planner.search import Request
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.least import LeastMemory
from planner.search.prices import Prices
from planner.search.refusal import looked_at
from planner.search.solve import Fingerprints

SEARCHED_S = 3.0
"""Seconds of a search for a quicker plan than the one that shows that something fits."""
WORTH_S = 0.5
"""With less time than this none is begun."""


@dataclass(frozen=True)
class Trial:
    """What is known of a change. ``found``: a plan that fits under it, its memory replayed; ``excluded``: none does by its sums
    (that is proven), nor do those of the least sums as replayed. Neither: the time was too short to tell. ``searched``: a
    search looked for the quickest plan."""

    found: tuple[Plan, Prediction] | None = None
    excluded: bool = False
    searched: bool = False

    @property
    def fits(self) -> bool:
        return self.found is not None


def try_change(graph: ModelGraph, cluster: Cluster, request: Request, deadline: float, known: Prices | None = None) -> Trial:
    """Look for the plans of least memory until one fits. ``deadline``: time.perf_counter; ``known``: prices of a like job."""
    if time.perf_counter() >= deadline:
        return Trial()
    try:
        limited = request.limited(cluster)
        candidates = enumerate_candidates(graph, limited, request)
    except PinError:
        return Trial(excluded=True)
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    prices, enough = Prices(graph, limited, request, candidates, known=known), limited.chip.memory_bytes

    def memory(some: Sequence[Candidate], least_bytes: float) -> LeastMemory:
        return LeastMemory(graph, some, prices, limited, request, names, deadline, enough=least_bytes)

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        return replayed(prediction, plan, graph, limited)

    least = looked_at(memory, candidates, enough, look, deadline)
    if least is None:
        return Trial(excluded=True)
    if least.prediction.fits:
        return Trial((least.plan, least.prediction))
    return Trial(excluded=least.bound_bytes > enough)


def searched(
    trial: Trial, graph: ModelGraph, cluster: Cluster, request: Request, deadline: float, known: Prices | None = None
) -> Trial:
    """The same with the best plan that a short search finds: what shows that something fits is seldom quick."""
    left = deadline - time.perf_counter()
    if left < WORTH_S or not trial.fits:
        return trial
    try:
        short = replace(request, time_limit_s=min(SEARCHED_S, left), gap=max(request.gap, 0.01))
        result = fitted(graph, cluster, short, known=known)
    except (NoPlanFits, PinError, ProfileError):
        return trial
    return Trial((result.plan, result.prediction), searched=True)


def fewest_devices(graph: ModelGraph, cluster: Cluster, request: Request) -> int:
    """No plan fits on fewer devices, whatever is cut how and however its memory is looked at: they hold master weights and
    moments once at least."""
    limited = request.limited(cluster)
    usable = limited.chip.memory_bytes - limited.chip.reserve_bytes
    elements = sum(parameter.type.elements() for parameter in graph.parameters if parameter.trainable)
    held = elements * MASTER_BYTES[request.precision] * (1 + MOMENTS)
    return max(1, math.ceil(held / max(usable, 1)))


def fewest_nodes(graph: ModelGraph, cluster: Cluster, request: Request) -> int:
    """The same of whole nodes."""
    return math.ceil(fewest_devices(graph, cluster, request) / cluster.devices_per_node)


def all_candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> list[Candidate]:
    """Those that are left without any constraint, and those under all of them (which may speak of more degrees)."""
    found = []
    for constraints in (Constraints(), request.constraints):
        try:
            found += enumerate_candidates(graph, cluster, replace(request, constraints=constraints))
        except PinError:
            continue
    return list(dict.fromkeys(found))
