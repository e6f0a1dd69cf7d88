"""The candidates of a search by tensor degree: how each is placed, and bounds of its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.search.candidates import Candidate
from planner.search.prices import Placements, Prices, Unit

Groups = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""A candidate's ZeRO groups, and those in which no block sends for every micro-batch."""


@dataclass(frozen=True)
class Degree:
    """What is known of a tensor degree. ``placed``: by unit; ``bounds``: of each of its candidates, in their order, the ZeRO
    groups that no other beats, and a bound of the step."""

    tensor: int
    placed: Mapping[Unit, tuple[Placements, ...]]
    bounds: tuple[tuple[Groups, float], ...]


class Degrees:
    """All of them. ``prices``: of the ``candidates``."""

    def __init__(self, prices: Prices, candidates: Sequence[Candidate]) -> None:
        self.prices, self.candidates = prices, candidates
        self._of: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            self._of.setdefault(candidate.mesh.tensor, []).append(candidate)
        self._known: dict[int, Degree] = {}

    @property
    def tensors(self) -> list[int]:
        """The degrees, from one rank on."""
        return sorted(self._of)

    def find(self, tensor: int) -> Degree:
        """Place and bound a degree."""
        found = tuple(map(self._bounded, self._of[tensor]))
        self._known[tensor] = Degree(tensor, {unit: self.prices.placed(unit) for unit in self.prices.units(tensor)}, found)
        return self._known[tensor]

    def _bounded(self, candidate: Candidate) -> tuple[Groups, float]:
        less = self.prices.without_beaten(candidate)
        return (less.zero_groups, less.once_groups), self.prices.bound(less)

    def learn(self, degree: Degree) -> None:
        """What was found elsewhere."""
        for unit, placed in degree.placed.items():
            self.prices.learn(unit, placed)
        self._known[degree.tensor] = degree

    def bounds(self) -> dict[Candidate, float]:
        """Of all candidates, less the ZeRO groups that another beats, in their order. Every degree must be known."""
        of: dict[int, Iterator[tuple[Groups, float]]] = {tensor: iter(self._known[tensor].bounds) for tensor in self._of}
        pairs = ((candidate, *next(of[candidate.mesh.tensor])) for candidate in self.candidates)
        return {candidate.with_groups(*groups): bound for candidate, groups, bound in pairs}
