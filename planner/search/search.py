"""Best first over all candidates: the one with the lowest bound is looked at more closely, until no bound is below the
best plan by more than the gap. The least bound that is left is the certificate."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hardware_profiles import Cluster
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.ir.serialize import fingerprint
from planner.search.candidates import enumerate_candidates
from planner.search.nodes import Attempt, Costing, Scope, Sketch
from planner.search.prices import Prices
from planner.search.refusal import last_resort
from planner.search.request import Certificate, Request, SearchResult
from planner.search.solve import Fingerprints

PROBED = 2
"""Chains of a candidate that get an early plan."""


@dataclass
class _State:
    """The frontier of the search. ``heap``: (bound, order, node)."""

    gap: float
    heap: list[tuple[float, int, Sketch | Attempt]] = field(default_factory=list)
    best: tuple[Plan, Prediction] | None = None
    finished_s: float = math.inf
    solved: int = 0
    order: Iterator[int] = field(default_factory=itertools.count)

    def target(self) -> float:
        """What a plan must be quicker than to matter."""
        return math.inf if self.best is None else self.best[1].step_s * (1 - self.gap)

    def report(self, plan: Plan, prediction: Prediction) -> None:
        if self.best is None or prediction.step_s < self.best[1].step_s:
            self.best = (plan, prediction)

    def push(self, node: Sketch | Attempt) -> None:
        if math.isfinite(node.bound):
            heapq.heappush(self.heap, (node.bound, next(self.order), node))


def search(
    graph: ModelGraph, cluster: Cluster, request: Request, *, costing: Costing | None = None
) -> SearchResult:
    """The best plan, proven to be within ``request.gap`` of the optimum unless the time limit ends the search before.

    Raises PinError where the pins leave no candidate, NoPlanFits where none fits in memory.
    """
    begin = time.perf_counter()
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    cluster = request.limited(cluster)
    candidates = enumerate_candidates(graph, cluster, request)
    own = Prices(graph, cluster, request, candidates)
    prices = own if costing is None else costing
    state = _State(request.gap)
    for candidate in candidates:
        state.push(Sketch(candidate, own.bound(candidate) if costing is None else 0.0))
    costed = time.perf_counter()
    deadline = costed + (math.inf if request.time_limit_s is None else request.time_limit_s)
    _refine(state, Scope(graph, prices, cluster, request, names), deadline)
    if state.best is None:
        found = last_resort(candidates, prices, graph, cluster, request, names)
        state.report(found.plan, found.prediction)
    assert state.best is not None
    plan, prediction = state.best
    left = min((bound for bound, _, _ in state.heap), default=math.inf)
    lower = min(left, state.finished_s, prediction.step_s)
    seconds = {"cost": costed - begin, "solve": time.perf_counter() - costed}
    return SearchResult(plan, prediction, Certificate(lower, len(candidates), state.solved), seconds)


def _refine(state: _State, scope: Scope, deadline: float) -> None:
    """Look closer at the node of the lowest bound, until the best plan is proven or the time is over. A candidate that looks
    better than all before it gets a plan at once, so that there is one early."""
    record = math.inf
    while state.heap:
        bound, _, node = state.heap[0]
        if bound >= state.target() or time.perf_counter() > deadline:
            return
        heapq.heappop(state.heap)
        if isinstance(node, Sketch):
            for part in node.advance(scope, state.target()):
                state.push(part)
            if node.counted and node.bound < min(record, state.target()):
                record = node.bound
                for attempt in sorted(node.attempts(scope), key=lambda attempt: attempt.bound)[:PROBED]:
                    attempt.probe(state.report)
            continue
        state.solved += node.level == 1
        if node.advance(state.target, deadline, scope.request.gap, state.report):
            state.finished_s = min(state.finished_s, node.bound)
        else:
            state.push(node)
