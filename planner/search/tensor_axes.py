"""The candidates of a search by tensor axis: how each is placed, and bounds of its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.plan import TensorAxis
from planner.search.candidates import Candidate
from planner.search.prices import Placements, Prices, Unit

Groups = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""A candidate's ZeRO groups, and those in which no block sends for every micro-batch."""


@dataclass(frozen=True)
class KnownAxis:
    """What is known of a tensor axis. ``placed``: by unit; ``bounds``: of each of its candidates, in their order, the ZeRO
    groups that no other beats, and a bound of the step."""

    axis: TensorAxis
    placed: Mapping[Unit, tuple[Placements, ...]]
    bounds: tuple[tuple[Groups, float], ...]


class TensorAxes:
    """All of them. ``prices``: of the ``candidates``."""

    def __init__(self, prices: Prices, candidates: Sequence[Candidate]) -> None:
        self.prices, self.candidates = prices, candidates
        self._of: dict[TensorAxis, list[Candidate]] = {}
        for candidate in candidates:
            self._of.setdefault(prices.axis(candidate), []).append(candidate)
        self._known: dict[TensorAxis, KnownAxis] = {}

    @property
    def each(self) -> list[TensorAxis]:
        """From one rank on."""
        return sorted(self._of)

    def find(self, axis: TensorAxis) -> KnownAxis:
        """Place and bound one."""
        found = tuple(map(self._bounded, self._of[axis]))
        self._known[axis] = KnownAxis(axis, {unit: self.prices.placed(unit) for unit in self.prices.units(axis)}, found)
        return self._known[axis]

    def _bounded(self, candidate: Candidate) -> tuple[Groups, float]:
        less = self.prices.without_beaten(candidate)
        return (less.zero_groups, less.once_groups), self.prices.bound(less)

    def learn(self, known: KnownAxis) -> None:
        """What was found elsewhere."""
        for unit, placed in known.placed.items():
            self.prices.learn(unit, placed)
        self._known[known.axis] = known

    def bounds(self) -> dict[Candidate, float]:
        """Of all candidates, less the ZeRO groups that another beats, in their order. Every axis must be known."""
        of: dict[TensorAxis, Iterator[tuple[Groups, float]]] = {axis: iter(self._known[axis].bounds) for axis in self._of}
        pairs = ((candidate, *next(of[self.prices.axis(candidate)])) for candidate in self.candidates)
        return {candidate.with_groups(*groups): bound for candidate, groups, bound in pairs}
