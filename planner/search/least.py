"""The plan that needs the least memory, over all candidates, with a proof.

Every candidate has a bound; it is looked at more closely as long as its bound is below the least peak that is known, and the
least bound left is what no plan is below. Candidates that may fit (where something is `enough`) come first; then what is
cheap and exact, one stage a rank; then several stages a rank; integer programs come last. Time plays no part.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cost_models.live import both_at_once
from hardware_profiles import Cluster
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction, StagePlan
from planner.search.allowed import Allowed, union_of
from planner.search.candidates import Candidate, allowed_choices, shape_of
from planner.search.chain import Chain
from planner.search.groups import bytes_alone, without_beaten
from planner.search.meshes import practised
from planner.search.ranges import Ranges
from planner.search.request import Request
from planner.search.solve import Fingerprints, Task, chains_of
from planner.search.thrifty import Thrift
from planner.search.thrifty_integers import thriftiest

EXACT_S = 4.0
"""Seconds for the exact least once it is proven that nothing is enough."""
MOST_INTEGERS = 1000
"""Blocks x stages of an integer program at most: larger ones end with no more than the bound that is known."""
INTEGER_S = 4.0
"""Seconds for the integer program of one chain at most."""
Costing = Callable[[Candidate], CostedGraph | None]


@dataclass(frozen=True)
class Least:
    """A plan of little memory. By its sums no plan has a peak below ``bound_bytes`` (reserve counted). ``closest``: of all
    plans that had a closer look, the one that needs the least by it; None: this plan."""

    plan: Plan
    prediction: Prediction
    bound_bytes: int
    closest: tuple[Plan, Prediction] | None = None

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_memory_bytes

    @property
    def thriftiest(self) -> tuple[Plan, Prediction]:
        """What needs the least memory of all that is known, and how much."""
        return self.closest or (self.plan, self.prediction)


@dataclass
class _Node:
    """A candidate, one of its chains, then that chain's least memory under the schedule: ever closer looks."""

    candidate: Candidate
    thrift: Thrift | None = None
    looks: int = 0

    @property
    def effort(self) -> int:
        """How much the next look costs: those with one stage a rank are cheap and exact."""
        return 0 if self.candidate.virtual == 1 else 1 if self.looks < 2 else 2


@dataclass
class LeastMemory:
    """The search under way. ``enough``: stop when a plan of at most so many bytes is known (reserve counted)."""

    graph: ModelGraph
    candidates: Sequence[Candidate]
    prices: Costing
    cluster: Cluster
    request: Request
    names: Fingerprints
    deadline: float = math.inf
    enough: float = -math.inf
    best: tuple[Plan, CostedGraph] | None = None
    peak: float = math.inf
    _unsolved: float = math.inf
    _heap: list[tuple[bool, int, float, int, _Node]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _chains: dict[object, tuple[Ranges, ...]] = field(default_factory=dict)

    def run(self) -> Least | None:
        """The plan of least memory; None where no candidate can be placed at all."""
        self._begin()
        proven = False
        while self._heap and self.peak > self.enough:
            if time.perf_counter() > self.deadline and self.best is not None:
                break
            hopeless, _, bound, _, node = heapq.heappop(self._heap)
            if bound >= self.peak:
                continue
            if hopeless and not proven:
                # Nothing is enough, that is proven; what is left only says more exactly by how much.
                proven, self.deadline = True, min(self.deadline, time.perf_counter() + EXACT_S)
            if node.thrift is None:
                shape = shape_of(node.candidate, self.cluster)
                for ranges in self._ranges_of(node.candidate):
                    self._push(max(bound, self._least_of(node.candidate, ranges)), _Node(node.candidate, Thrift(ranges, shape)))
            else:
                self._look(bound, node)
        if self.best is None:
            return None
        bound = min([self.peak, self._unsolved, *(entry[2] for entry in self._heap)])
        plan, costed = self.best
        return Least(plan, evaluate(plan, costed, self.cluster), math.floor(bound))

    def bounds(self) -> list[tuple[float, Candidate]]:
        """Candidates, each with one ZeRO group, by the least that their sums may be; before :meth:`run`, and instead of it."""
        self._begin()
        return sorted(((bound, node.candidate) for _, _, bound, _, node in self._heap), key=lambda pair: pair[0])

    def _begin(self) -> None:
        """Every candidate with a bound. Families come with the widest tensor degree inside the fastest links first, which keeps
        least of activations (then narrower ones, then wider); where a plan of so many bytes is ``enough``, the least of each is
        tried at once."""
        families: dict[object, list[Candidate]] = defaultdict(list)
        for candidate in sorted(self.candidates, key=lambda each: (-practised(self.cluster, each.mesh), each.micro)):
            families[self._family(candidate)].append(candidate)
        for members in families.values():
            for alone in self._light(members[0]).each:
                if self.peak <= self.enough or (time.perf_counter() > self.deadline and self.best is not None):
                    self._unsolved = min(self._unsolved, self.cluster.chip.reserve_bytes)
                    return
                self._open([member.with_groups(alone.zero_groups, alone.once_groups) for member in members])

    def _light(self, candidate: Candidate) -> Candidate:
        """Less the ZeRO groups under which parameters are no smaller than under another."""
        priced = [costed.states for each in candidate.each if (costed := self.prices(each)) is not None]
        if not priced or len(candidate.groups) == 1:
            return candidate
        stages = union_of(allowed_choices(candidate.first, self.request.constraints, self.graph)).zero
        return without_beaten(candidate, priced, stages, bytes_alone)

    def _open(self, members: Sequence[Candidate]) -> None:
        """A family's candidates of one ZeRO group."""
        ranges = self._ranges_of(members[0])
        bounds = [min((self._least_of(member, each) for each in ranges), default=math.inf) for member in members]
        for bound, member in zip(bounds, members, strict=True):
            self._push(bound, _Node(member))
        bound, at = min((bound, at) for at, bound in enumerate(bounds))
        if bound <= self.enough < math.inf and members[at].virtual == 1:
            for each in self._ranges_of(members[at]):
                node = _Node(members[at], Thrift(each, shape_of(members[at], self.cluster)))
                stages = node.thrift.solve(math.inf)[1] if node.thrift is not None else None
                if stages is not None:
                    self._report(node, stages)

    def _push(self, bound: float, node: _Node) -> None:
        if math.isfinite(bound):
            heapq.heappush(self._heap, (bound > self.enough > 0, node.effort, bound, next(self._order), node))

    def _spaces(self, candidate: Candidate) -> tuple[tuple[Allowed, ...], ...]:
        constraints, graph = self.request.constraints, self.graph
        return tuple(allowed_choices(candidate, constraints, graph, parallel) for parallel in (False, True))

    def _family(self, candidate: Candidate) -> object:
        """Candidates of one family are bound by the prices of the smallest micro-batch among them: what blocks keep never
        shrinks with it (sizes are affine in it, and a tensor degree has the same placements for all)."""
        mesh = candidate.mesh
        return (
            mesh.data, mesh.data_stride, mesh.tensor_axis, candidate.groups, mesh.pipeline > 1, candidate.accumulation > 1,
            self._spaces(candidate.first),
        )

    def _ranges_of(self, candidate: Candidate) -> tuple[Ranges, ...]:
        """The chains of a candidate; the same for candidates with the same prices and choices."""
        key = (candidate.group, candidate.accumulation > 1, self._spaces(candidate))
        if key not in self._chains:
            costed = self.prices(candidate)
            chains = () if costed is None else chains_of((costed,), candidate, self.request)
            found = (Ranges(chain.costed, chain.option, chain.allowed) for chain in chains)
            self._chains[key] = tuple(ranges for ranges in found if ranges.possible)
        return self._chains[key]

    def _least_of(self, candidate: Candidate, ranges: Ranges) -> float:
        """The mean over ranks of what all blocks keep of one micro-batch, and of their gradients where both are there."""
        costed = ranges.costed
        # Of a value that crosses a cut, the block before or the one after counts it, or both.
        stages = candidate.mesh.pipeline * candidate.virtual
        beside = (stages - 1) * min(0, ranges.least_crossing - ranges.most_received) / candidate.mesh.pipeline
        together = both_at_once(candidate.mesh.pipeline, candidate.virtual, candidate.accumulation)
        of_blocks = ranges.least_sum if together else ranges.least_apart
        kept = of_blocks / candidate.mesh.pipeline + beside + costed.context_bytes + ranges.least_transient
        return kept + candidate.accumulation * costed.batch_bytes + self.cluster.chip.reserve_bytes

    def _look(self, bound: float, node: _Node) -> None:
        """First with the schedule's live micro-batches, then exactly (or nearly), then by an integer program."""
        assert node.thrift is not None
        reserve = self.cluster.chip.reserve_bytes
        looks, node.looks = node.looks, node.looks + 1
        if looks == 0:
            self._push(max(bound, node.thrift.quick_bound() + reserve), node)
            return
        if looks == 1:
            found, stages = node.thrift.solve(self.peak - reserve)
        else:
            found, stages = thriftiest(node.thrift, min(INTEGER_S, max(0.1, self.deadline - time.perf_counter())))
        if stages is not None:
            self._report(node, stages)
        size = node.thrift.ranges.count * node.thrift.shape.stages
        if node.thrift.shape.virtual > 1 and looks == 1 and size <= MOST_INTEGERS:
            self._push(max(bound, found + reserve), node)
        elif found + reserve < self.peak - 1:
            # What is left open: nobody looks at it again, but it is the bound.
            self._unsolved = min(self._unsolved, max(bound, found + reserve))

    def _plan(self, node: _Node, stages: tuple[StagePlan, ...]) -> Plan:
        assert node.thrift is not None
        return self._task(node.candidate, node.thrift.ranges).plan(stages)

    def tasks(self, candidate: Candidate) -> list[Task]:
        """The chains of a candidate of one ZeRO group."""
        return [self._task(candidate, ranges) for ranges in self._ranges_of(candidate)]

    def _task(self, candidate: Candidate, ranges: Ranges) -> Task:
        chain = Chain((ranges.costed,), ranges.option, ranges.allowed, candidate.groups)
        return Task(candidate, chain, self.cluster, self.request, self.names)

    def _report(self, node: _Node, stages: tuple[StagePlan, ...]) -> None:
        assert node.thrift is not None
        peak = float(node.thrift.sizes(stages).max()) + self.cluster.chip.reserve_bytes
        if peak < self.peak:
            self.peak, self.best = peak, (self._plan(node, stages), node.thrift.ranges.costed)
