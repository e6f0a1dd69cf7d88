"""Best first over all candidates: the one with the lowest bound is looked at more closely, until no bound is below the
best plan by more than the gap. The least bound that is left is the certificate."""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hardware_profiles import Cluster
from hardware_profiles.measure import usable_cores
from planner.ir.graph import ModelGraph
from planner.ir.serialize import fingerprint
from planner.search.best import Best
from planner.search.beyond import Beyond
from planner.search.candidates import Candidate, candidates_of
from planner.search.climb import Climb
from planner.search.effort import has_time
from planner.search.families import Costing, Scope
from planner.search.helper import Answer, Fresh, Helper, Space, started, waits
from planner.search.nodes import Attempt, Kin, Sketch, kin_of
from planner.search.placing import bounds_of
from planner.search.prices import Prices
from planner.search.refusal import last_resort
from planner.search.request import Certificate, Look, News, Request, SearchResult, as_it_is, no_news
from planner.search.solve import Fingerprints
from planner.search.tensor_axes import Apart, TensorAxes

PROBED = 2
"""Chains of a candidate that get an early plan."""
MANY = 400
"""So many candidates are worth a second process from the beginning on."""
HELPED_AFTER_S = 0.5
"""Seconds after which a second process is worth its start."""
WIDELY, WIDELY_FOR = ((5.0, 0.03), (12.0, 0.01)), 0.5
"""Seconds after which plans are sought in every mesh that is left, where more than this part of a step is open; for this part
of the time so far."""
AHEAD, FAR_AHEAD = 6, 128
"""So much kin the helper has at most that is not counted yet; at the beginning, where nobody else counts it."""
SHARED, LONG_SHARED = 2, 16
"""So many attempts the helper has at least, as far as there are any: one may be over at once. Where it is not asked again for
long, because one is looked at here for a second time: most are over sooner than that."""
NEARER = 0.75
"""An attempt is shared where all that the helper has is nearer to the target than this part of its way."""
WAIT_S, LAST_WAIT_S = 0.05, 0.5
"""Seconds for which an answer is waited for before the clock is looked at, and when the time is over."""
NEWS_S = 5.0
"""Seconds between two news of a search under way."""
UNTIL_ANY = 0.5
"""Part of the time after which a search without any plan looks for the one that takes the least memory."""
FINISH_S = 10.0
"""Before it does, plans that fit by a closer look alone are looked for as if so many seconds were left at least."""

Node = Kin | Sketch | Attempt | Apart


@dataclass
class _State:
    """The frontier of the search. ``kin``: whose sketches are not counted yet, by bound; ``heap``: (bound, order, node); both
    without what the ``helper`` looks at. ``heard``: what it has said of attempts, to be seen to; ``given``: what it has given
    back, likewise. ``alone``: there is no helper and will be none."""

    best: Best
    news: News = no_news
    kin: deque[Kin] = field(default_factory=deque)
    heap: list[tuple[float, int, Node]] = field(default_factory=list)
    helper: Helper | None = None
    heard: deque[tuple[Attempt, bool]] = field(default_factory=deque)
    given: deque[Fresh] = field(default_factory=deque)
    alone: bool = False
    finished_s: float = math.inf
    solved: int = 0
    order: Iterator[int] = field(default_factory=itertools.count)
    _told_at: float = field(default_factory=time.perf_counter)

    @property
    def home_s(self) -> float:
        """No plan is quicker that is left to look for here."""
        return min(self.heap[0][0] if self.heap else math.inf, self.kin[0].bound if self.kin else math.inf)

    @property
    def least_s(self) -> float:
        """No plan that is left to look for is quicker."""
        heard = [*(attempt.bound for attempt, _ in self.heard), *(given.bound for given in self.given)]
        return min(self.home_s, *heard, math.inf if self.helper is None else self.helper.least_s)

    @property
    def lower_s(self) -> float:
        """No plan of the space is quicker."""
        return min(self.least_s, self.finished_s, self.best.step_s)

    def open(self) -> dict[Candidate, float]:
        """The candidates of what is left, with the least bound of each."""
        nodes: list[Node] = [*self.kin, *(node for _, _, node in self.heap), *(attempt for attempt, _ in self.heard)]
        nodes += () if self.helper is None else self.helper.away.values()
        found: dict[Candidate, float] = {}
        for node in nodes:
            if isinstance(node, Apart):
                continue
            for each in node.sketches if isinstance(node, Kin) else (node,):
                found[each.candidate] = min(each.bound, found.get(each.candidate, math.inf))
        return found

    def tell(self) -> None:
        """News, from time to time."""
        now = time.perf_counter()
        if self.best.found is not None and now > self._told_at + NEWS_S:
            self._told_at = now
            self.news(self.best.step_s, 1 - self.lower_s / self.best.step_s)

    def push(self, node: Node) -> None:
        """A node that is left, were it as slow as the best plan: how much quicker it may be is part of the certificate."""
        if math.isfinite(node.bound):
            heapq.heappush(self.heap, (node.bound, next(self.order), node))

    def pop(self) -> Node | None:
        """The node of the lowest bound that is to be looked at here. The helper gets attempts that nobody has looked at, as
        many as are under way here, and :data:`SHARED` at least; where there are none, further nodes are opened. Where none is
        left here that matters, one comes back that it does not look at now, or it is asked for a part of what it has."""
        target_s, helper = self.best.target(), self.helper
        while self.home_s < target_s:
            if self.kin and self.kin[0].bound <= self.home_s:
                return self.kin.popleft()
            _, _, node = heapq.heappop(self.heap)
            if not isinstance(node, Attempt):
                return node
            if helper is not None and not node.looks and helper.attempts(target_s) <= self._begun(target_s):
                helper.send([node], self.best.step_s)
                continue
            enough = LONG_SHARED if node.looks else SHARED
            self._share(target_s, enough)
            further = self._unopened(target_s, enough)
            if further is None:
                self._part(node, target_s)
                return node
            self.push(node)
            return further
        back = None if helper is None else helper.back(target_s)
        if helper is not None and back is None:
            helper.ask()
        return back

    def _unopened(self, target_s: float, enough: int) -> Kin | Sketch | Apart | None:
        """Where the helper has not enough although it was given what there is, a node here with more attempts in it."""
        if self.helper is None or self.helper.attempts(target_s) >= enough:
            return None
        if self.kin and self.kin[0].bound < target_s:
            return self.kin.popleft()
        found = min((each for each in self.heap if not isinstance(each[2], Attempt) and each[0] < target_s), default=None)
        if found is None:
            return None
        self._take_out(found)
        node = found[2]
        assert not isinstance(node, Attempt)
        return node

    def _take_out(self, entry: tuple[float, int, Node]) -> None:
        self.heap.remove(entry)
        heapq.heapify(self.heap)

    def _share(self, target_s: float, enough: int) -> None:
        """Give the helper attempts that nobody has looked at, the first ones, until it has enough; and of those under way here
        that are gone on with there as well, as many as to have about as many under way as are here."""
        helper = self.helper
        while helper is not None:
            fresh, begun = helper.attempts(target_s) < enough, helper.begun(target_s) < self._begun(target_s)
            found = [
                (node.looks > 0, bound, order, node) for bound, order, node in self.heap
                if isinstance(node, Attempt) and bound < target_s and (begun and node.movable if node.looks else fresh)
            ]
            if not found:
                return
            _, bound, order, node = min(found)
            self._take_out((bound, order, node))
            helper.send([node], self.best.step_s)

    def _part(self, node: Attempt, target_s: float) -> None:
        """Where the helper still has next to nothing, or nothing that is as far from proven, give it a part of the attempt that
        is looked at here."""
        helper = self.helper
        if helper is None or not node.looks:
            return
        if helper.attempts(target_s) < SHARED or target_s - helper.least_s < NEARER * (target_s - node.bound):
            part = node.part(target_s)
            if part is not None:
                helper.send([part], self.best.step_s)

    def _begun(self, target_s: float) -> int:
        """Attempts under way here that matter."""
        return sum(isinstance(node, Attempt) and node.looks > 0 and bound < target_s for bound, _, node in self.heap)

    def meanwhile(self) -> bool:
        """Keep the helper busy with counting for some time. Returns whether the best plan is proven."""
        self.hear()
        self.feed(FAR_AHEAD)
        return self.least_s >= self.best.target()

    def feed(self, most: int = AHEAD) -> None:
        """Give the helper kin to count, up to as much, where it has half of that or less."""
        if self.helper is None or 2 * len(self.helper.away) > most:
            return
        left, target_s, nodes, later = most - len(self.helper.away), self.best.target(), list[Kin](), list[Kin]()
        while left > len(nodes) and self.kin and self.kin[0].bound < target_s:
            # Without a target, what was counted roughly comes last.
            kin = self.kin.popleft()
            (later if kin.rough and math.isinf(target_s) else nodes).append(kin)
        if not nodes:
            nodes, later = later[:left], later[left:]
        self.kin.extendleft(reversed(later))
        if nodes:
            self.helper.send(nodes, self.best.step_s)

    def add(self, bounds: Mapping[Candidate, float]) -> None:
        """Candidates to count."""
        fresh = kin_of(Sketch(candidate, bound) for candidate, bound in bounds.items() if math.isfinite(bound))
        self.kin = deque(sorted([*self.kin, *fresh], key=lambda kin: kin.bound))

    def hear(self, wait_s: float = 0.0) -> None:
        """Take in what the helper has found, which is waited for where it is nothing yet."""
        while self.helper is not None:
            self.helper.tell(self.best.step_s)
            try:
                heard = self.helper.answer(wait_s)
            except ProcessLookupError:
                # What it had begins anew here.
                for lost in self.helper.away.values():
                    self.push(replace(lost, looks=0) if isinstance(lost, Attempt) else lost)
                self.close()
                self.alone = True
                return
            if heard is None:
                return
            self._take(*heard)
            wait_s = 0.0

    def _take(self, node: Kin | Attempt | None, answer: Answer) -> None:
        if answer.given is not None:
            self.given.append(answer.given)
            return
        if answer.plan is not None:
            self.best.keep(*answer.plan)
        if isinstance(node, Kin):
            for sketch, bound in zip(node.sketches, answer.bounds, strict=True):
                sketch.bound, sketch.rough = max(sketch.bound, bound), True
            for kin in kin_of(sketch for sketch in node.sketches if math.isfinite(sketch.bound)):
                if answer.rough:
                    insort(self.kin, kin, key=lambda kin: kin.bound)
                else:
                    # Of those that may still be quicker, all at once, it is found out here what that bound is made of.
                    self.push(kin)
        elif node is not None:
            node.bound = max(node.bound, answer.bound)
            node.mixed, node.looks = answer.mixed, node.looks + 1
            self.heard.append((node, answer.finished))

    def looked(self, attempt: Attempt, finished: bool, scope: Scope, *, here: bool) -> None:
        """Keep what a look has left of an attempt."""
        self.solved += attempt.whole and attempt.looks == 1
        if attempt.mixed:
            for part in attempt.apart(scope):
                self.push(part)
        elif finished:
            self.finished_s = min(self.finished_s, attempt.bound)
        elif here:
            self.push(attempt)

    def last_words(self, scope: Scope) -> None:
        """What the helper has found when the time is over: of the node that it looks at, soon."""
        self.hear(0.0 if self.helper is None or self.helper.least_s >= self.best.target() else LAST_WAIT_S)
        while self.heard:
            self.looked(*self.heard.popleft(), scope, here=False)

    def start(self, space: Space | None = None) -> None:
        """Start a helper, where there is none and a core for one, and have it bound the candidates of a space."""
        if self.helper is not None:
            return
        self.alone = True
        if usable_cores() >= 2:
            with suppress(OSError):
                self.helper, self.alone = started(), False
        if self.helper is not None and space is not None:
            self.helper.bound(space)

    def call(self, scope: Scope, deadline: float) -> None:
        """Begin to have help."""
        self.start()
        if self.helper is not None:
            try:
                self.helper.begin(self.best, scope, deadline)
            except (pickle.PicklingError, AttributeError, TypeError):
                self.close()
                self.alone = True

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
    state = _State(Best(request.gap, look, most_s=request.most_s), news)
    try:
        # What another search knows is here alone.
        space = Space(graph, cluster, request) if costing is None and known is None else None
        if waits():
            state.start(space)
        candidates = candidates_of(graph, cluster, request)
        if sum(len(kind.virtuals) for kind in candidates.nearest) >= MANY:
            state.start(space)
        own = Prices(graph, cluster, request, candidates.kinds, known=known)
        prices = own if costing is None else costing
        if costing is None:
            axes = TensorAxes(own, candidates)
            bounds = bounds_of(axes, None if space is None else state.helper)
            for apart in axes.apart():
                state.push(apart)
        else:
            bounds = {candidate: 0.0 for kind in candidates.kinds for candidate in kind.candidates}
        state.add(bounds)
        costed = time.perf_counter()
        scope, limit_s = Scope(graph, prices, cluster, request, names), request.time_limit_s
        deadline = math.inf if limit_s is None else costed + limit_s
        if state.helper is not None:
            state.call(scope, deadline)
        climb = Climb(bounds, scope, state.best, state.meanwhile)
        climb.begin(deadline)
        beyond = Beyond(bounds, scope, state.best, state.meanwhile) if look is not as_it_is else None
        if beyond is not None:
            beyond.go(deadline)
        _refine(state, scope, climb, deadline, math.inf if limit_s is None else costed + limit_s * UNTIL_ANY)
        if state.best.found is None and beyond is not None:
            beyond.finish(max(deadline, time.perf_counter() + FINISH_S))
        if state.best.found is None:
            left = [candidate for _, _, node in state.heap if isinstance(node, Apart) for candidate in node.bounds(own)]
            found = last_resort([*climb.bounds, *left], prices, graph, cluster, request, names, deadline, look)
            state.best.keep(found.plan, found.prediction)
            _refine(state, scope, climb, deadline)
        state.last_words(scope)
        if beyond is not None:
            beyond.finish(deadline)
        lower_s = state.lower_s
    finally:
        state.close()
    assert state.best.found is not None
    plan, prediction = state.best.found
    seconds = {"cost": costed - begin, "solve": time.perf_counter() - costed}
    return SearchResult(plan, prediction, Certificate(lower_s, candidates.count, state.solved), seconds, own)


def _refine(state: _State, scope: Scope, climb: Climb, deadline: float, until_any: float = math.inf) -> None:
    """Look closer at the node of the lowest bound, until the best plan is proven or the time is over (``until_any``: that
    without any plan). From every best plan the search goes uphill."""
    begin, best, wide = time.perf_counter(), state.best, list(WIDELY)
    while state.least_s < best.target():
        now, target_s = time.perf_counter(), best.target()
        if now > deadline or (best.found is None and now > until_any):
            return
        if state.helper is None and not state.alone and now > begin + HELPED_AFTER_S:
            state.call(scope, deadline)
        if wide and best.found is not None and now > begin + wide[0][0]:
            _, worth = wide.pop(0)
            if 1 - state.least_s / best.step_s > worth:
                climb.widely(state.open(), min(deadline, now + WIDELY_FOR * (now - begin)))
        state.feed()
        state.hear()
        while state.given:
            given = state.given.popleft().node(scope)
            assert isinstance(given, Attempt)
            state.push(given)
        node = state.heard[0][0] if state.heard else state.pop()
        if node is None:
            state.hear(WAIT_S)
        elif isinstance(node, Kin):
            node.count(scope, best.target())
            for sketch in node.sketches:
                state.push(sketch)
        elif isinstance(node, Sketch):
            _nearer(node, state, scope, deadline)
        elif isinstance(node, Apart):
            assert isinstance(scope.prices, Prices)
            if len(node.kinds) > 1:
                for part in node.parts(scope.prices):
                    state.push(part)
                continue
            bounds = node.bounds(scope.prices)
            state.add(bounds)
            climb.add(bounds)
            continue
        elif state.heard:
            state.looked(*state.heard.popleft(), scope, here=False)
        else:
            state.looked(node, node.advance(best.target, deadline, best.gap, best.report), scope, here=True)
        if node is not None and best.target() < target_s:
            climb.go(node.candidate, deadline)
        state.tell()


def _nearer(sketch: Sketch, state: _State, scope: Scope, deadline: float) -> None:
    """Its chains take a sketch's place, or where its schedule is too long to look at it more closely, their bounds. They get a
    plan where there is none."""
    attempts, others_s = sketch.attempts(scope, state.best.target())
    state.finished_s = min(state.finished_s, others_s)
    closer = has_time(sketch.candidate.actions, deadline) and not sketch.candidate.long
    for attempt in attempts:
        if closer:
            state.push(attempt)
        else:
            state.finished_s = min(state.finished_s, attempt.bound)
    if state.best.found is None:
        for attempt in sorted(attempts, key=lambda attempt: attempt.bound)[:PROBED]:
            attempt.probe(state.best.report, state.best.target())
