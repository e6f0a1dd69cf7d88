"""Best first over all candidates: the one with the lowest bound is looked at more closely, until no bound is below the
best plan by more than the gap. The least bound that is left is the certificate."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hardware_profiles import Cluster
from planner.evaluate import send_seconds
from planner.ir.costed import CostedGraph
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.ir.plan import SPLIT_BACKWARD, Mesh, Plan, Prediction
from planner.ir.serialize import fingerprint
from planner.search.candidates import Candidate, enumerate_candidates, shape_of
from planner.search.chain import Chain
from planner.search.closed_form import cheap_bound
from planner.search.columns import Shape
from planner.search.fluid import Fluid, Pool, merged
from planner.search.greedy import even_cuts, greedy_stages, rounded_cuts
from planner.search.master import Effort
from planner.search.prices import Prices
from planner.search.refusal import refuse
from planner.search.request import Certificate, Request, SearchResult
from planner.search.solve import Attempt, Fingerprints, Task, chains_of, try_stages

MERGED_ROUNDS = 3
DIVES, DIVING = 80, 0.25
"""Candidates that are tried for a first answer at most, and the part of the time limit for it."""
PROBES, PROBED_CHAINS = 60, 2
"""So many sketches get plans of their own, of so many of their chains."""
Costing = Callable[[Candidate], CostedGraph | None]
"""The prices of a candidate's group; None where its tensor degree has no feasible placement."""


@dataclass
class _State:
    """The frontier of the search. ``heap``: (bound, order, node)."""

    heap: list[tuple[float, int, Sketch | Attempt]] = field(default_factory=list)
    best: tuple[Plan, Prediction] | None = None
    finished_s: float = math.inf
    solved: int = 0
    order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best[1].step_s

    def report(self, plan: Plan, prediction: Prediction) -> None:
        if prediction.step_s < self.best_s:
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
    candidates = enumerate_candidates(graph, cluster, request)
    own = Prices(graph, cluster, request, candidates)
    prices = own if costing is None else costing
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    state = _State()
    for candidate in candidates:
        state.push(Sketch(candidate, own.bound(candidate) if costing is None else 0.0))
    costed = time.perf_counter()
    deadline = costed + (math.inf if request.time_limit_s is None else request.time_limit_s)
    scope = _Scope(prices, cluster, request, names)
    _dive(state, scope, costed + DIVING * (deadline - costed))
    _refine(state, scope, deadline)
    if state.best is None:
        if state.heap or math.isfinite(state.finished_s):
            raise NoPlanFits("--time-limit", "no plan was found in time, but none is proven impossible", "give more time")
        refuse(candidates, prices, graph, cluster, request, names)
    assert state.best is not None
    plan, prediction = state.best
    left = min((bound for bound, _, _ in state.heap), default=math.inf)
    lower = min(left, state.finished_s, prediction.step_s)
    seconds = {"cost": costed - begin, "solve": time.perf_counter() - costed}
    return SearchResult(plan, prediction, Certificate(lower, len(candidates), state.solved), seconds)


@dataclass(frozen=True)
class _Scope:
    """What all nodes share."""

    prices: Costing
    cluster: Cluster
    request: Request
    names: Fingerprints
    pool: Pool = field(default_factory=dict)


@dataclass
class Sketch:
    """A candidate before its options are told apart: first a bound without its prices, then one over all its chains."""

    candidate: Candidate
    bound: float
    chains: tuple[Chain, ...] | None = None
    fluid: Fluid | None = None
    rounds: int = 0

    def advance(self, scope: _Scope, worthless_s: float) -> list[Sketch | Attempt]:
        """A closer look at the same, or the tasks that it consists of."""
        shape = shape_of(self.candidate, scope.cluster)
        if self.chains is None:
            self._price(scope, shape)
            return [self] if self.chains else []
        if self.fluid is not None and self.rounds < MERGED_ROUNDS:
            self.rounds += 1
            self.bound = max(self.bound, self.fluid.solve(worthless_s, self.rounds))
            return [self]
        tasks = [Task(self.candidate, chain, scope.cluster, scope.request, scope.names) for chain in self.chains]
        return [Attempt(task, max(self.bound, cheap_bound(task.chain, shape)), scope.pool) for task in tasks]

    def _price(self, scope: _Scope, shape: Shape) -> None:
        costed = scope.prices(self.candidate)
        chains = () if costed is None else chains_of(costed, self.candidate, scope.request)
        bounds = [cheap_bound(chain, shape) for chain in chains]
        self.chains = tuple(chain for chain, bound in zip(chains, bounds, strict=True) if math.isfinite(bound))
        if self.chains:
            self.bound = max(self.bound, min(bounds))
            stream = merged(self.chains)
            if stream is not None:
                send_s = send_seconds(scope.cluster, self.candidate.mesh, stream.crossing_bytes)
                self.fluid = Fluid(stream, shape, send_s, scope.pool)

    def probe(self, scope: _Scope, report: Callable[[Plan, Prediction], None]) -> None:
        """Plans near the fluid's solution and with even cuts, of the chains with the least bounds: an answer exists early."""
        assert self.fluid is not None and self.chains is not None
        shape = self.fluid.shape
        near = rounded_cuts(self.fluid.parts, self.fluid.stream.blocks)
        for chain in _promising(self.chains, shape)[:PROBED_CHAINS]:
            task = Task(self.candidate, chain, scope.cluster, scope.request, scope.names)
            for cuts in dict.fromkeys((near, even_cuts(chain.block_works, shape.stages))):
                try_stages(task, greedy_stages(chain, shape, cuts), report)


def _dive(state: _State, scope: _Scope, deadline: float) -> None:
    """A first answer: even plans of each mesh and schedule with the smallest micro-batch, under the fewest virtual stages
    (both keep the fewest activations) and under the quickest; those first that look quickest with the whole bubble."""
    sketches = [(bound, node.candidate) for bound, _, node in state.heap if isinstance(node, Sketch)]
    least: dict[Mesh, int] = {}
    for _, candidate in sketches:
        least[candidate.mesh] = min(candidate.micro, least.get(candidate.mesh, candidate.micro))
    picked: dict[tuple[Mesh, str, bool], tuple[float, float, int, Candidate]] = {}
    for at, (bound, candidate) in enumerate(sketches):
        if candidate.micro == least[candidate.mesh]:
            estimate_s = _estimate(candidate, bound)
            for frugal, rank in ((True, float(candidate.virtual)), (False, estimate_s)):
                item, key = (rank, estimate_s, at, candidate), (candidate.mesh, candidate.schedule, frugal)
                picked[key] = min(picked.get(key, item), item)
    tries = sorted({item[1:] for item in picked.values()}, key=lambda item: item[:2])
    # In turns over the pipeline degrees, plain 1f1b first: estimates know nothing of activations, of which it keeps least.
    seen: Counter[tuple[int, bool]] = Counter()
    turns: list[tuple[int, bool, float, Candidate]] = []
    for estimate_s, _, candidate in tries:
        kind = (candidate.mesh.pipeline, candidate.schedule != "1f1b")
        turns.append((seen[kind], kind[1], estimate_s, candidate))
        seen[kind] += 1
    for _, _, estimate_s, candidate in sorted(turns, key=lambda turn: turn[:3])[:DIVES]:
        if time.perf_counter() > deadline:
            return
        if estimate_s >= state.best_s:
            continue
        shape, costed = shape_of(candidate, scope.cluster), scope.prices(candidate)
        chains = () if costed is None else chains_of(costed, candidate, scope.request)
        for chain in _promising(chains, shape):
            task = Task(candidate, chain, scope.cluster, scope.request, scope.names)
            try_stages(task, greedy_stages(chain, shape, even_cuts(chain.block_works, shape.stages)), state.report)


def _promising(chains: Sequence[Chain], shape: Shape) -> list[Chain]:
    """Of each option, the chain with the least bound."""
    best: dict[int, tuple[float, int]] = {}
    for at, chain in enumerate(chains):
        item = (cheap_bound(chain, shape), at)
        best[chain.option] = min(best.get(chain.option, item), item)
    return [chains[at] for bound, at in sorted(best.values()) if math.isfinite(bound)]


def _estimate(candidate: Candidate, bound: float) -> float:
    """The bound with the schedule's usual bubble (Narayanan 2021, section 2.2; a third of it where backward is split)."""
    part = (candidate.mesh.pipeline - 1) / (candidate.virtual * candidate.accumulation)
    return bound * (1 + part / (3 if candidate.schedule in SPLIT_BACKWARD else 1))


def _refine(state: _State, scope: _Scope, deadline: float) -> None:
    """Look closer at the node of the lowest bound, until the best plan is proven or the time is over."""
    gap, probes = scope.request.gap, 0
    while state.heap:
        bound, _, node = state.heap[0]
        worthless_s = state.best_s * (1 - gap)
        if bound >= worthless_s or time.perf_counter() > deadline:
            return
        heapq.heappop(state.heap)
        if isinstance(node, Sketch):
            for part in node.advance(scope, worthless_s):
                state.push(part)
                if isinstance(part, Sketch) and part.rounds == 1 and part.bound < worthless_s and probes < PROBES:
                    probes += 1
                    part.probe(scope, state.report)
            continue
        began = node.limit_s > 0.0
        over = node.advance(Effort(gap / 2, deadline), state.best_s, state.report)
        state.solved += not began and node.limit_s > 0.0
        if over:
            state.finished_s = min(state.finished_s, node.bound)
        else:
            state.push(node)
