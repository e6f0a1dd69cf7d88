"""What the search looks at: candidates, then the chains of the promising ones, ever more closely."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hardware_profiles import Cluster
from planner.ir.costed import CostedGraph
from planner.ir.graph import ModelGraph
from planner.search.allowed import Allowed
from planner.search.branches import Branches
from planner.search.candidates import Candidate, allowed_choices, shape_of
from planner.search.chain import Chain
from planner.search.counted import Ranks
from planner.search.counts import Counts, Effort
from planner.search.engine import planning_engine
from planner.search.greedy import even_cuts, greedy_stages, rounded_cuts
from planner.search.paths import Pool
from planner.search.patterns import Patterns
from planner.search.request import Look, Request
from planner.search.solve import Fingerprints, Task, certain_tied_seconds, chains_of, try_stages
from planner.search.stream import Stream, stream_of
from planner.search.works import Work, works

Costing = Callable[[Candidate], CostedGraph | None]
"""The prices of a candidate's group; None where its tensor degree has no feasible placement."""
FIRST_SLICE_S = 0.5
"""Seconds of the first look at branches; each further look may take twice as long."""
REPEATS = 4
"""So often a solution that does not fit after all is sought again with less memory."""


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
    """One chain of a candidate under way: first its relaxation, then branches of it. ``bound`` of its step is always valid."""

    task: Task
    counts: Counts
    bound: float
    slice_s: float = FIRST_SLICE_S
    branches: Branches | None = None
    looks: int = 0
    _tried: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.bound = max(self.bound, self.counts.bound + self.tied_s)

    def probe(self, report: Look, target_s: float) -> None:
        """Plans with even cuts, where they can be quicker than the target: of equal stages, and of equal ranks."""
        cuts = even_cuts(self.task.chain.block_works, self.counts.shape.stages)
        patterns = Patterns(self.counts.stream, self.counts.shape)
        if not patterns.possible:
            self._cut(cuts, report)
            return
        cases = np.concatenate([patterns.counts_of(cuts)[None], patterns.even()])
        seconds = patterns.seconds(cases) + self.tied_s
        for at in dict.fromkeys((0, 1 + int(seconds[1:].argmin()))):
            if seconds[at] < target_s:
                self._cut(patterns.cuts(cases[at]), report)

    @property
    def candidate(self) -> Candidate:
        return self.task.candidate

    @cached_property
    def tied_s(self) -> float:
        """Seconds of summing tied gradients, wherever the cuts are."""
        return certain_tied_seconds(self.task)

    def advance(self, target: Callable[[], float], deadline: float, gap: float, report: Look) -> bool:
        """One look. ``target()``: what a plan must be quicker than to matter. Returns whether nothing more can be learned."""
        self.looks += 1
        if self.branches is None:
            self.branches = Branches(self.counts)

        def found(counts: Counts) -> float:
            self._report(counts, report)
            return target() - self.tied_s

        until = min(deadline, time.perf_counter() + self.slice_s)
        unfinished = self.branches.solve(Effort(target() - self.tied_s, until, gap=gap / 4), found)
        self.bound = max(self.bound, self.branches.bound + self.tied_s)
        self.slice_s *= 2
        return not unfinished

    def _report(self, counts: Counts, report: Look) -> None:
        """The plan of a solution, or one near it."""
        if counts.exact:
            prediction = try_stages(self.task, counts.stages(), report)
            if prediction is not None and not prediction.fits:
                counts.tighten(prediction.peak_memory_bytes - prediction.memory_limit_bytes)
        else:
            self._cut(rounded_cuts(counts.counts, counts.stream.blocks), report)

    def _cut(self, cuts: tuple[int, ...], report: Look) -> None:
        shape = self.counts.shape
        if cuts in self._tried:
            return
        self._tried.add(cuts)
        for _ in range(REPEATS):
            prediction = try_stages(self.task, greedy_stages(self.task.chain, shape, cuts), report)
            if prediction is None or prediction.fits:
                return
            excess = prediction.peak_memory_bytes - prediction.memory_limit_bytes
            shape = replace(shape, capacity_bytes=shape.capacity_bytes - excess)
