"""Best first over all candidates: the one with the lowest bound is looked at more closely, until no bound is below the
best plan by more than the gap. The least bound that is left is the certificate."""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hardware_profiles import Cluster
from hardware_profiles.measure import usable_cores
from planner.ir.graph import ModelGraph
from planner.ir.serialize import fingerprint
from planner.search.best import Best
from planner.search.candidates import enumerate_candidates
from planner.search.climb import Climb
from planner.search.helper import Helper
from planner.search.nodes import Attempt, Costing, Scope, Sketch
from planner.search.prices import Prices
from planner.search.refusal import last_resort
from planner.search.request import Certificate, Look, News, Request, SearchResult, as_it_is, no_news
from planner.search.solve import Fingerprints

PROBED = 2
"""Chains of a candidate that get an early plan."""
HELPED_AFTER_S = 0.5
"""Seconds after which a second process is worth its start."""
WAIT_S, LAST_WAIT_S = 0.05, 0.5
"""Seconds for which an answer is waited for before the clock is looked at, and when the time is over."""
NEWS_S = 5.0
"""Seconds between two news of a search under way."""
UNTIL_ANY = 0.5
"""Part of the time after which a search without any plan looks for the one that takes the least memory."""


@dataclass
class _State:
    """The frontier of the search. ``heap``: (bound, order, node), without what the ``helper`` looks at. ``alone``: there is no
    helper and will be none."""

    best: Best
    news: News = no_news
    heap: list[tuple[float, int, Sketch | Attempt]] = field(default_factory=list)
    helper: Helper | None = None
    alone: bool = False
    finished_s: float = math.inf
    solved: int = 0
    order: Iterator[int] = field(default_factory=itertools.count)
    _told_at: float = field(default_factory=time.perf_counter)

    @property
    def least_s(self) -> float:
        """No plan that is left to look for is quicker."""
        return min(self.heap[0][0] if self.heap else math.inf, math.inf if self.helper is None else self.helper.least_s)

    @property
    def lower_s(self) -> float:
        """No plan of the space is quicker."""
        return min(self.least_s, self.finished_s, self.best.step_s)

    def tell(self) -> None:
        """News, from time to time."""
        now = time.perf_counter()
        if self.best.found is not None and now > self._told_at + NEWS_S:
            self._told_at = now
            self.news(self.best.step_s, 1 - self.lower_s / self.best.step_s)

    def push(self, node: Sketch | Attempt) -> None:
        if math.isfinite(node.bound):
            heapq.heappush(self.heap, (node.bound, next(self.order), node))

    def pop(self) -> Sketch | Attempt | None:
        """The node of the lowest bound that is to be looked at here. The helper gets attempts that nobody has looked at, as
        many as are under way here; where none is left here that matters, one comes back that it has not come to."""
        target_s, helper = self.best.target(), self.helper
        while self.heap and self.heap[0][0] < target_s:
            _, _, node = heapq.heappop(self.heap)
            if helper is None or not isinstance(node, Attempt) or node.looks or len(helper.away) > self._begun(target_s):
                return node
            helper.send(node, self.best.step_s)
        return None if helper is None else helper.back(target_s)

    def _begun(self, target_s: float) -> int:
        """Attempts under way here that matter."""
        return sum(isinstance(node, Attempt) and node.looks > 0 and bound < target_s for bound, _, node in self.heap)

    def hear(self, wait_s: float = 0.0) -> tuple[Attempt, bool] | None:
        """The next attempt that the helper has looked at, and whether nothing more can be learned of it."""
        if self.helper is None:
            return None
        self.helper.tell(self.best.step_s)
        try:
            heard = self.helper.answer(wait_s)
        except ProcessLookupError:
            # What it had begins anew here.
            for lost in self.helper.away.values():
                self.push(replace(lost, looks=0))
            self.close()
            self.alone = True
            return None
        if heard is None:
            return None
        attempt, answer = heard
        if answer.plan is not None:
            self.best.keep(*answer.plan)
        if attempt is None:
            return None
        attempt.bound, attempt.mixed, attempt.looks = max(attempt.bound, answer.bound), answer.mixed, attempt.looks + 1
        return attempt, answer.finished

    def looked(self, attempt: Attempt, finished: bool, scope: Scope, *, here: bool) -> None:
        """Keep what a look has left of an attempt."""
        self.solved += attempt.looks == 1
        if attempt.mixed:
            for part in attempt.apart(scope):
                self.push(part)
        elif finished:
            self.finished_s = min(self.finished_s, attempt.bound)
        elif here:
            self.push(attempt)

    def last_words(self, scope: Scope) -> None:
        """What the helper has found when the time is over: of the attempt that it looks at, soon."""
        wait_s = 0.0 if self.helper is None or self.helper.least_s >= self.best.target() else LAST_WAIT_S
        for _ in range(1 if self.helper is None else 1 + len(self.helper.away)):
            heard = self.hear(wait_s)
            if heard is None:
                return
            self.looked(*heard, scope, here=False)
            wait_s = 0.0

    def call(self, deadline: float) -> None:
        """Begin to have help."""
        self.alone = True
        if usable_cores() >= 2:
            with suppress(OSError, pickle.PicklingError, AttributeError, TypeError):
                self.helper, self.alone = Helper(self.best.look, self.best.gap, deadline), False

    def close(self) -> None:
        """No helper any more."""
        if self.helper is not None:
            self.helper.close()
            self.helper = None


def search(
    graph: ModelGraph, cluster: Cluster, request: Request, *, costing: Costing | None = None, look: Look = as_it_is,
    known: Prices | None = None, news: News = no_news,
) -> SearchResult:
    """The best plan, proven to be within ``request.gap`` of the optimum unless the time limit ends the search before.

    ``look``: a closer look at a plan that would be the best so far; where its memory does not fit by that, the plan is passed
    over. The certificate stays that of the space that the sums of memory admit, of which this leaves a part. ``known``: prices
    of another search of the same graph. ``news``: is told from time to time how far the search has come.
    Raises PinError where the pins leave no candidate, NoPlanFits where none fits in memory.
    """
    begin = time.perf_counter()
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    cluster = request.limited(cluster)
    candidates = enumerate_candidates(graph, cluster, request)
    own = Prices(graph, cluster, request, candidates, known=known)
    prices = own if costing is None else costing
    state = _State(Best(request.gap, look), news)
    bounds = {candidate: own.bound(candidate) if costing is None else 0.0 for candidate in candidates}
    for candidate, bound in bounds.items():
        state.push(Sketch(candidate, bound))
    costed = time.perf_counter()
    scope, limit_s = Scope(graph, prices, cluster, request, names), request.time_limit_s
    deadline = math.inf if limit_s is None else costed + limit_s
    climb = Climb(bounds, scope, state.best.target, state.best.report)
    try:
        climb.begin(deadline)
        _refine(state, scope, climb, deadline, math.inf if limit_s is None else costed + limit_s * UNTIL_ANY)
        if state.best.found is None:
            found = last_resort(candidates, prices, graph, cluster, request, names, deadline, look)
            state.best.keep(found.plan, found.prediction)
            _refine(state, scope, climb, deadline)
        state.last_words(scope)
        lower_s = state.lower_s
    finally:
        state.close()
    assert state.best.found is not None
    plan, prediction = state.best.found
    seconds = {"cost": costed - begin, "solve": time.perf_counter() - costed}
    return SearchResult(plan, prediction, Certificate(lower_s, len(candidates), state.solved), seconds, own)


def _refine(state: _State, scope: Scope, climb: Climb, deadline: float, until_any: float = math.inf) -> None:
    """Look closer at the node of the lowest bound, until the best plan is proven or the time is over (``until_any``: that
    without any plan). A candidate gets a plan at once where it looks better than all before it, and where its turn comes while
    there is none; from every best plan it goes uphill."""
    begin, best, records = time.perf_counter(), state.best, [math.inf]
    while state.least_s < best.target():
        now, target_s = time.perf_counter(), best.target()
        if now > deadline or (best.found is None and now > until_any):
            return
        if state.helper is None and not state.alone and now > begin + HELPED_AFTER_S:
            state.call(deadline)
        heard = state.hear()
        node = heard[0] if heard is not None else state.pop()
        if node is None:
            heard = state.hear(WAIT_S)
            if heard is None:
                continue
            node = heard[0]
        if isinstance(node, Sketch):
            _sketched(node, state, scope, records)
        else:
            finished = heard[1] if heard is not None else node.advance(best.target, deadline, best.gap, best.report)
            state.looked(node, finished, scope, here=heard is None)
        if best.target() < target_s:
            climb.go(node.candidate, deadline)
        state.tell()


def _sketched(node: Sketch, state: _State, scope: Scope, records: list[float]) -> None:
    """A closer look at a sketch. ``records``: bounds of those that looked better than all before them."""
    best = state.best
    parts = node.advance(scope, best.target())
    attempts: list[Attempt] = []
    if best.found is None:
        attempts = [part for part in parts if isinstance(part, Attempt)]
    if node in parts and node.bound < records[-1]:
        records.append(node.bound)
        attempts = node.attempts(scope)
    for attempt in sorted(attempts, key=lambda attempt: attempt.bound)[:PROBED]:
        attempt.probe(best.report, best.target())
    if state.helper is not None and not state.helper.away and best.found is not None and node in parts:
        # It would have nothing to do until all sketches have had their look.
        for attempt in node.attempts(scope):
            if attempt.bound < best.target():
                state.helper.send(attempt, best.step_s)
        return
    for part in parts:
        state.push(part)
