"""The chains that candidates share, and what is known of them before they are told apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hardware_profiles import Cluster
from planner.ir.costed import CostedGraph
from planner.ir.graph import ModelGraph
from planner.search.allowed import ONCE, Allowed
from planner.search.candidates import Candidate, allowed_choices
from planner.search.chain import Chain, Name, without_beaten
from planner.search.counted import Ranks
from planner.search.engine import planning_engine
from planner.search.linear import Floats, Indices
from planner.search.paths import Pool
from planner.search.prices import Prices
from planner.search.request import Request
from planner.search.shape import Shape
from planner.search.solve import Fingerprints, chains_of
from planner.search.stream import Stream, stream_of
from planner.search.together import Together
from planner.search.works import Work, works

Costing = Callable[[Candidate], CostedGraph | None]
"""The prices of a candidate of one ZeRO group; None where its tensor degree has no feasible placement."""


@dataclass(frozen=True)
class Bundle:
    """Chains as one: every block may have the choices of any of them. ``chains``: none as long as they are not priced."""

    chains: tuple[Chain, ...]
    stream: Stream
    works: tuple[Work, ...]

    def bounds(self, shapes: Sequence[Shape], target_s: float) -> Floats:
        """[shapes]: of the step under each, which a family has: by their work; where that is below the target, by the blocks
        that ranks can have."""
        bounds = Together(self.stream, tuple(shapes), self.works).work_s.copy()
        near = np.flatnonzero(bounds < target_s)
        if len(near):
            bounds[near] = np.maximum(bounds[near], self._together(shapes, near).bounds(target_s))
        return bounds

    def counted(self, shapes: Sequence[Shape], target_s: float) -> list[Counted]:
        """Under each of some shapes that a family has."""
        bounds = self.bounds(shapes, target_s)
        found = [Counted(self, bound) for bound in bounds.tolist()]
        near = np.flatnonzero(bounds < target_s)
        together = self._together(shapes, near)
        for place, at in enumerate(near.tolist()):
            found[at] = replace(found[at], ranks=Ranks(self.stream, shapes[at], self.works, (together, place)))
        return found

    def _together(self, shapes: Sequence[Shape], some: Indices) -> Together:
        return Together(self.stream, tuple(shapes[at] for at in some.tolist()), self.works)


@dataclass(frozen=True)
class Counted:
    """A bundle under a shape. ``bound``: of the step; ``ranks``: of one that may be quicker than the target."""

    bundle: Bundle
    bound: float
    ranks: Ranks | None = None


@dataclass(frozen=True)
class Family:
    """The chains of all candidates that share mesh, micro-batch, ZeRO groups and choices."""

    candidate: Candidate
    chains: tuple[Chain, ...]
    cluster: Cluster

    def bundles(self, groups: Iterable[Sequence[Chain]]) -> list[Bundle]:
        """The chains of each group as one; none of a group whose runs differ."""
        found = []
        for group in groups:
            stream = stream_of(group, self.candidate.mesh, self.cluster, planning_engine())
            if stream is not None:
                found.append(Bundle(tuple(group), stream, works(stream, self.candidate.accumulation)))
        return found

    @cached_property
    def alike(self) -> list[Bundle]:
        """As one the chains that differ in single blocks only (in most models the two ends): what they share is most of the
        work of looking at them, and what a mixture of their ends gains is little."""
        groups: dict[object, list[Chain]] = {}
        for chain in self.chains:
            groups.setdefault(chain.repeated, []).append(chain)
        return [bundle for group in groups.values() for bundle in self.bundles([group]) or self.apart(group)]

    def apart(self, chains: Sequence[Chain]) -> list[Bundle]:
        """Each chain for itself, or where it is one, each of its ZeRO groups."""
        return self.bundles((chain,) for chain in (chains if len(chains) > 1 else chains[0].parts))

    def chosen(self, names: Collection[Name]) -> list[Chain]:
        """The chains of these names, parts of chains too."""
        found, left = list[Chain](), deque(self.chains)
        while left and len(found) < len(names):
            chain = left.popleft()
            if chain.name in names:
                found.append(chain)
            elif len(chain.zero_groups) > 1:
                left.extend(chain.parts)
        return found


@dataclass
class Scope:
    """What all nodes share."""

    graph: ModelGraph
    prices: Costing
    cluster: Cluster
    request: Request
    names: Fingerprints
    pool: Pool = field(default_factory=dict)
    roughs: dict[object, Bundle | None] = field(default_factory=dict)
    families: dict[object, Family | None] = field(default_factory=dict)

    def kin(self, candidate: Candidate) -> object:
        """What candidates share that have a family in common."""
        groups = candidate.zero_groups, candidate.once_groups
        return candidate.mesh, candidate.micro, groups, self._spaces(candidate.first)

    def rough(self, candidate: Candidate) -> Bundle | None:
        """What its chains take at least, as far as that is known before they are priced."""
        key = self.kin(candidate)
        if key not in self.roughs:
            stream = self.prices.rough(candidate) if isinstance(self.prices, Prices) else None
            self.roughs[key] = None if stream is None else Bundle((), stream, works(stream, candidate.accumulation))
        return self.roughs[key]

    def family(self, candidate: Candidate) -> Family | None:
        """The chains of a candidate; None where it has none."""
        key = self.kin(candidate)
        if key not in self.families:
            apart = [candidate.with_groups(candidate.zero_groups[:1], candidate.once_groups)]
            apart += [candidate.with_groups((groups,)) for groups in candidate.zero_groups[1:]]
            chains = without_beaten([chain for each in apart for chain in self._chains(each)], planning_engine())
            self.families[key] = Family(candidate, chains, self.cluster) if chains else None
        return self.families[key]

    def _chains(self, candidate: Candidate) -> Iterator[Chain]:
        """Those that leave every block a choice, with all its ZeRO groups, which allow the same."""
        found = ((each, self.prices(each)) for each in candidate.each)
        priced = [_sent_once(costed) if each.once_groups else costed for each, costed in found if costed is not None]
        chains = chains_of(tuple(priced), candidate, self.request) if priced else ()
        yield from (chain for chain in chains if chain.possible)

    def _spaces(self, candidate: Candidate) -> tuple[tuple[Allowed, ...], ...]:
        constraints = self.request.constraints
        return tuple(allowed_choices(candidate, constraints, self.graph, parallel) for parallel in (False, True))


def _sent_once(costed: CostedGraph) -> CostedGraph:
    """Less the ZeRO stages that send for every micro-batch."""
    states = tuple(
        {name: {zero: state for zero, state in stages.items() if zero in ONCE} for name, stages in option.items()}
        for option in costed.states
    )
    return replace(costed, states=states)
