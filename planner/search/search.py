"""Best first over all candidates: the one with the lowest bound is looked at more closely, until no bound is below the
best plan by more than the gap. The least bound that is left is the certificate."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hardware_profiles import Cluster
from planner.costing import Pricing, cost_graph, cost_state
from planner.costing.blocks import parameter_elements
from planner.costing.graphs import ZERO_STAGES
from planner.ir.costed import CostedGraph
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement
from planner.ir.plan import Plan, Prediction
from planner.ir.serialize import fingerprint
from planner.placement import place_graph
from planner.search.candidates import Candidate, Group, cheap_bound, enumerate_candidates, shape_of, some_block_is_too_large
from planner.search.chain import Chain
from planner.search.master import Effort
from planner.search.refusal import refuse
from planner.search.request import Certificate, Request, SearchResult
from planner.search.solve import Attempt, Fingerprints, Task, chains_of

Costing = Callable[[Candidate], CostedGraph | None]
"""The prices of a candidate's group; None where its tensor degree has no feasible placement."""


@dataclass
class _State:
    """The frontier of the search. ``heap``: (bound, order, attempt)."""

    heap: list[tuple[float, int, Attempt]] = field(default_factory=list)
    best: tuple[Plan, Prediction] | None = None
    finished_s: float = math.inf
    solved: int = 0

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best[1].step_s

    def report(self, plan: Plan, prediction: Prediction) -> None:
        if prediction.step_s < self.best_s:
            self.best = (plan, prediction)


def search(
    graph: ModelGraph, cluster: Cluster, request: Request, *, costing: Costing | None = None
) -> SearchResult:
    """The best plan, proven to be within ``request.gap`` of the optimum unless the time limit ends the search before.

    Raises PinError where the pins leave no candidate, NoPlanFits where none fits in memory.
    """
    begin = time.perf_counter()
    candidates = enumerate_candidates(graph, cluster, request)
    prices = costing if costing is not None else _default_costing(graph, cluster, request)
    names = Fingerprints(graph.name, fingerprint(graph), cluster.name, cluster.fingerprint)
    state = _State()
    state.heap = _frontier(candidates, prices, cluster, request, names)
    costed = time.perf_counter()
    deadline = costed + (math.inf if request.time_limit_s is None else request.time_limit_s)
    _refine(state, request, deadline)
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


def _frontier(
    candidates: list[Candidate], prices: Costing, cluster: Cluster, request: Request, names: Fingerprints
) -> list[tuple[float, int, Attempt]]:
    """Every candidate's tasks with their cheap bounds. Chains are shared between candidates of equal prices."""
    heap: list[tuple[float, int, Attempt]] = []
    costed: dict[Group, CostedGraph | None] = {}
    chains: dict[tuple[Group, bool], tuple[Chain, ...]] = {}
    order = itertools.count()
    too_large: dict[int, int] = {}
    for candidate in sorted(candidates, key=lambda c: c.micro):
        tensor = candidate.mesh.tensor
        if candidate.micro >= too_large.get(tensor, candidate.micro + 1):
            continue
        if candidate.group not in costed:
            costed[candidate.group] = prices(candidate)
        graph = costed[candidate.group]
        if graph is None:
            continue
        shape = shape_of(candidate, cluster)
        key = (candidate.group, shape.splits_backward)
        if key not in chains:
            chains[key] = chains_of(graph, candidate, request)
            if all(some_block_is_too_large(chain, shape) for chain in chains[key]):
                # Activations grow with the micro-batch: no larger one of this tensor degree can fit either.
                too_large[tensor] = candidate.micro
        for chain in chains[key]:
            bound = cheap_bound(chain, shape)
            if math.isfinite(bound):
                heap.append((bound, next(order), Attempt(Task(candidate, chain, cluster, request, names), bound)))
    heapq.heapify(heap)
    return heap


def _refine(state: _State, request: Request, deadline: float) -> None:
    """Solve tasks, lowest bound first, until the best plan is proven or the time is over."""
    while state.heap:
        bound, order, attempt = state.heap[0]
        if bound >= state.best_s * (1 - request.gap) or time.perf_counter() > deadline:
            return
        if attempt.visits == 0 and attempt.master is None:
            state.solved += attempt.limit_s == 0.0
        over = attempt.advance(Effort(request.gap / 2, deadline), state.best_s, state.report)
        if over:
            heapq.heappop(state.heap)
            state.finished_s = min(state.finished_s, attempt.bound)
        else:
            heapq.heapreplace(state.heap, (attempt.bound, order, attempt))


def _default_costing(graph: ModelGraph, cluster: Cluster, request: Request) -> Costing:
    """Placements once per tensor degree and micro-batch, prices once per group."""
    first: dict[tuple[int, int], CostedGraph] = {}
    placed: dict[tuple[int, int], tuple[Mapping[str, BodyPlacement], ...]] = {}

    def prices(candidate: Candidate) -> CostedGraph | None:
        degree = (candidate.mesh.tensor, candidate.micro)
        if degree not in placed:
            options = place_graph(graph, degree[0], Pricing(cluster, *degree))
            placed[degree] = tuple(option.placements for option in options)
        if not placed[degree]:
            return None
        if degree not in first:
            first[degree] = cost_graph(
                graph, cluster, mesh=candidate.mesh, microbatch=candidate.micro, precision=request.precision,
                zero_group=candidate.zero_group, options=placed[degree],
            )
            return first[degree]
        # Blocks cost the same whatever the data axis; only their state is shared and summed differently.
        states = tuple(
            {
                body.name: {
                    zero: cost_state(
                        parameter_elements(body, option[body.name]), zero, cluster, candidate.mesh, request.precision,
                        candidate.zero_group,
                    )
                    for zero in ZERO_STAGES
                }
                for body in graph.bodies
            }
            for option in placed[degree]
        )
        return replace(first[degree], states=states)

    return functools.cache(prices)
