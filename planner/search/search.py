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
from planner.search.climb import Climb
from planner.search.nodes import Attempt, Costing, Scope, Sketch
from planner.search.prices import Prices
from planner.search.refusal import last_resort
from planner.search.request import Certificate, Look, Request, SearchResult, as_it_is
from planner.search.solve import Fingerprints

PROBED = 2
"""Chains of a candidate that get an early plan."""
UNTIL_ANY = 0.5
"""Part of the time after which a search without any plan looks for the one that takes the least memory."""


@dataclass
class _State:
    """The frontier of the search. ``look``: see :func:`search`; ``heap``: (bound, order, node)."""

    gap: float
    look: Look
    heap: list[tuple[float, int, Sketch | Attempt]] = field(default_factory=list)
    best: tuple[Plan, Prediction] | None = None
    finished_s: float = math.inf
    solved: int = 0
    order: Iterator[int] = field(default_factory=itertools.count)

    def target(self) -> float:
        """What a plan must be quicker than to matter."""
        return math.inf if self.best is None else self.best[1].step_s * (1 - self.gap)

    def report(self, plan: Plan, prediction: Prediction) -> Prediction:
        """Keep a plan that is better than all before and fits by a closer look as well; returns what that look saw."""
        if self.best is None or prediction.step_s < self.best[1].step_s:
            prediction = self.look(plan, prediction)
            if prediction.fits:
                self.best = (plan, prediction)
        return prediction

    def push(self, node: Sketch | Attempt) -> None:
        if math.isfinite(node.bound):
            heapq.heappush(self.heap, (node.bound, next(self.order), node))


def search(
    graph: ModelGraph, cluster: Cluster, request: Request, *, costing: Costing | None = None, look: Look = as_it_is,
    known: Prices | None = None,
) -> SearchResult:
    """The best plan, proven to be within ``request.gap`` of the optimum unless the time limit ends the search before.

    ``look``: a closer look at a plan that would be the best so far; where its memory does not fit by that, the plan is passed
    over. The certificate stays that of the space that the sums of memory admit, of which this leaves a part. ``known``: prices
    of another search of the same graph.
    Raises PinError where the pins leave no candidate, NoPlanFits where none fits in memory.
    """
    begin = time.perf_counter()
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    cluster = request.limited(cluster)
    candidates = enumerate_candidates(graph, cluster, request)
    own = Prices(graph, cluster, request, candidates, known=known)
    prices = own if costing is None else costing
    state = _State(request.gap, look)
    bounds = {candidate: own.bound(candidate) if costing is None else 0.0 for candidate in candidates}
    for candidate, bound in bounds.items():
        state.push(Sketch(candidate, bound))
    costed = time.perf_counter()
    scope, limit_s = Scope(graph, prices, cluster, request, names), request.time_limit_s
    deadline = math.inf if limit_s is None else costed + limit_s
    climb = Climb(bounds, scope, state.target, state.report)
    climb.begin(deadline)
    _refine(state, scope, climb, deadline, math.inf if limit_s is None else costed + limit_s * UNTIL_ANY)
    if state.best is None:
        found = last_resort(candidates, prices, graph, cluster, request, names, deadline, look)
        state.best = (found.plan, found.prediction)
        _refine(state, scope, climb, deadline)
    plan, prediction = state.best
    left = min((bound for bound, _, _ in state.heap), default=math.inf)
    lower = min(left, state.finished_s, prediction.step_s)
    seconds = {"cost": costed - begin, "solve": time.perf_counter() - costed}
    return SearchResult(plan, prediction, Certificate(lower, len(candidates), state.solved), seconds, own)


def _refine(state: _State, scope: Scope, climb: Climb, deadline: float, until_any: float = math.inf) -> None:
    """Look closer at the node of the lowest bound, until the best plan is proven or the time is over (``until_any``: that
    without any plan). A candidate gets a plan at once where it looks better than all before it, and where its turn comes while
    there is none; from every best plan it goes uphill."""
    record = math.inf
    while state.heap:
        best_s = state.target()
        bound, _, node = state.heap[0]
        now = time.perf_counter()
        if bound >= state.target() or now > deadline or (state.best is None and now > until_any):
            return
        heapq.heappop(state.heap)
        if isinstance(node, Sketch):
            parts = node.advance(scope, state.target())
            for part in parts:
                state.push(part)
            attempts: list[Attempt] = []
            if state.best is None:
                attempts = [part for part in parts if isinstance(part, Attempt)]
            if node in parts and node.bound < record:
                record, attempts = node.bound, node.attempts(scope)
            for attempt in sorted(attempts, key=lambda attempt: attempt.bound)[:PROBED]:
                attempt.probe(state.report, state.target())
        else:
            state.solved += node.looks == 1
            finished = node.advance(state.target, deadline, scope.request.gap, state.report)
            if node.mixed:
                for part in node.apart(scope):
                    state.push(part)
            elif finished:
                state.finished_s = min(state.finished_s, node.bound)
            else:
                state.push(node)
        if state.target() < best_s:
            climb.go(node.candidate, deadline)
