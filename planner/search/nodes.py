"""What the search looks at: candidates, then the chains of the promising ones, ever more closely."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from hardware_profiles import Cluster
from planner.ir.costed import CostedGraph
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.search.allowed import Allowed
from planner.search.candidates import Candidate, allowed_choices, shape_of
from planner.search.chain import Chain
from planner.search.counted import Ranks
from planner.search.counts import Counts, Effort
from planner.search.engine import planning_engine
from planner.search.greedy import even_cuts, greedy_stages, rounded_cuts
from planner.search.paths import Pool
from planner.search.request import Request
from planner.search.solve import Fingerprints, Task, certain_tied_seconds, chains_of, try_stages
from planner.search.stream import Stream, stream_of
from planner.search.works import Work, works

Costing = Callable[[Candidate], CostedGraph | None]
"""The prices of a candidate's group; None where its tensor degree has no feasible placement."""
Report = Callable[[Plan, Prediction], None]
FIRST_SLICE_S = 1.0
"""Seconds of the first look with whole numbers; each further look may take twice as long."""


@dataclass(frozen=True)
class Family:
    """The chains of all candidates that share mesh, micro-batch, ZeRO group and choices."""

    candidate: Candidate
    chains: tuple[Chain, ...]
    cluster: Cluster

    def _stream(self, chains: tuple[Chain, ...]) -> tuple[Stream, tuple[Work, ...]] | None:
        stream = stream_of(chains, self.candidate.mesh, self.cluster, planning_engine())
        return None if stream is None else (stream, works(stream, self.candidate.accumulation))

    @cached_property
    def together(self) -> tuple[Stream, tuple[Work, ...]] | None:
        """All chains as one."""
        return self._stream(self.chains)

    @cached_property
    def apart(self) -> tuple[tuple[Stream, tuple[Work, ...]], ...]:
        """Each chain for itself."""
        return tuple(pair for pair in (self._stream((chain,)) for chain in self.chains) if pair is not None)


@dataclass
class Scope:
    """What all nodes share."""

    graph: ModelGraph
    prices: Costing
    cluster: Cluster
    request: Request
    names: Fingerprints
    pool: Pool = field(default_factory=dict)
    families: dict[object, Family | None] = field(default_factory=dict)

    def family(self, candidate: Candidate) -> Family | None:
        """The chains of a candidate; None where it has none."""
        key = (candidate.mesh, candidate.micro, candidate.zero_group, self._spaces(candidate))
        if key not in self.families:
            costed = self.prices(candidate)
            chains = () if costed is None else chains_of(costed, candidate, self.request)
            chains = tuple(chain for chain in chains if chain.possible)
            self.families[key] = Family(candidate, chains, self.cluster) if chains else None
        return self.families[key]

    def _spaces(self, candidate: Candidate) -> tuple[tuple[Allowed, ...], ...]:
        constraints = self.request.constraints
        return tuple(allowed_choices(candidate, constraints, self.graph, parallel) for parallel in (False, True))


@dataclass
class Sketch:
    """A candidate whose chains are not told apart yet. ``bound``: of its step; ``counted``: over all its chains as one."""

    candidate: Candidate
    bound: float
    counted: bool = False

    def advance(self, scope: Scope, target_s: float) -> list[Sketch | Attempt]:
        """A closer look, then its chains, less those that cannot be quicker than the target."""
        family = scope.family(self.candidate)
        if family is None:
            return []
        if not self.counted and family.together is not None:
            self.counted = True
            stream, known = family.together
            self.bound = max(self.bound, Ranks(stream, shape_of(self.candidate, scope.cluster), known).costs.bound)
            return [self] if self.bound < target_s else []
        return [attempt for attempt in self.attempts(scope) if attempt.bound < target_s]

    def attempts(self, scope: Scope) -> list[Attempt]:
        """Its chains."""
        family, shape = scope.family(self.candidate), shape_of(self.candidate, scope.cluster)
        assert family is not None
        result = []
        for chain, (stream, known) in zip(family.chains, family.apart, strict=True):
            task = Task(self.candidate, chain, scope.cluster, scope.request, scope.names)
            ranks = Ranks(stream, shape, known)
            result.append(Attempt(task, Counts(ranks, scope.pool, bound=ranks.costs.bound), self.bound))
        return result


@dataclass
class Attempt:
    """One chain of a candidate under way: first its relaxation, then whole counts, then whole choices. ``bound`` of its step is
    always valid."""

    task: Task
    counts: Counts
    bound: float
    level: int = 0
    slice_s: float = FIRST_SLICE_S

    def __post_init__(self) -> None:
        self.bound = max(self.bound, self.counts.bound + self.tied_s)

    def probe(self, report: Report) -> None:
        """A plan with even cuts."""
        self._cut(even_cuts(self.task.chain.block_works, self.counts.shape.stages), report)

    @cached_property
    def tied_s(self) -> float:
        """Seconds of summing tied gradients, wherever the cuts are."""
        return certain_tied_seconds(self.task)

    def advance(self, target: Callable[[], float], deadline: float, gap: float, report: Report) -> bool:
        """One look. ``target()``: what a plan must be quicker than to matter. Returns whether nothing more can be learned."""
        counts = self._counts()
        whole = self.level > 0
        until = min(deadline, time.perf_counter() + self.slice_s) if whole else deadline

        def found() -> float:
            self._report(counts, report)
            return target() - self.tied_s

        effort = Effort(target() - self.tied_s, until, gap=gap / 4)
        unfinished = counts.solve(effort, whole=whole, found=found if whole else None)
        self.bound = max(self.bound, counts.bound + self.tied_s)
        if not whole and counts.values is not None and self.bound < target():
            self._report(counts, report)
            self.probe(report)
        if unfinished and whole:
            self.slice_s *= 2
            return False
        self.level += 1
        return self.level > 2

    def _counts(self) -> Counts:
        if self.level == 2 and not self.counts.exact:
            known = self.counts
            self.counts = Counts(known.ranks, known.pool, exact=True, bound=known.bound)
        return self.counts

    def _report(self, counts: Counts, report: Report) -> None:
        """The plan of a solution, or one near it."""
        if counts.exact:
            prediction = try_stages(self.task, counts.stages(), report)
            if prediction is not None and not prediction.fits:
                counts.tighten(prediction.peak_memory_bytes - prediction.memory_limit_bytes)
        else:
            self._cut(rounded_cuts(counts.counts, counts.stream.blocks), report)

    def _cut(self, cuts: tuple[int, ...], report: Report) -> None:
        try_stages(self.task, greedy_stages(self.task.chain, self.counts.shape, cuts), report)
