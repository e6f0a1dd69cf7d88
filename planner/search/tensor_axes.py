"""The candidates of a search by tensor axis: how each is placed, and bounds of its candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ir.plan import TensorAxis
from planner.search.candidates import Candidate, Candidates, Groups, Kind
from planner.search.prices import Placements, Prices, Unit

Placed = Mapping[Unit, tuple[Placements, ...]]
"""Placements by unit."""


@dataclass(frozen=True)
class KnownAxis:
    """What is known of a tensor axis. ``bounds``: of each of its candidates, in their order, the ZeRO groups that no other
    beats, and a bound of the step; ``apart_s``: such a bound of candidates over as many tensor ranks that lie farther apart."""

    axis: TensorAxis
    placed: Placed
    bounds: tuple[tuple[Groups, float], ...]
    apart_s: float


@dataclass
class Unplaced:
    """Candidates over a tensor axis whose ranks are not nearest each other: no ``bound`` of their step is known but that of the
    tensor degree; where they are ``placed``, of the axis."""

    axis: TensorAxis
    kinds: tuple[Kind, ...]
    bound: float
    placed: bool = False

    def place(self, prices: Prices) -> Placed:
        """How all such axes of the degree are placed."""
        self.placed, self.bound = True, max(self.bound, prices.bound_over(self.axis))
        return {unit: prices.placed(unit) for unit in prices.units((self.axis[0], False))}

    def bounds(self, prices: Prices) -> dict[Candidate, float]:
        """Of each of them, less the ZeRO groups that another beats."""
        found: dict[Candidate, float] = {}
        for kind in self.kinds:
            for candidate in kind.candidates:
                less = prices.without_beaten(candidate)
                found[less] = max(self.bound, prices.bound(less))
        return found


class TensorAxes:
    """All of them. ``prices``: of the ``candidates``, those over axes that are ``apart`` among them."""

    def __init__(self, prices: Prices, candidates: Candidates) -> None:
        self.prices, self.apart = prices, candidates.apart
        self.candidates = [candidate for kind in candidates.nearest for candidate in kind.candidates]
        self._of: dict[TensorAxis, list[Candidate]] = {}
        for candidate in self.candidates:
            self._of.setdefault(prices.axis(candidate.mesh), []).append(candidate)
        self._known: dict[TensorAxis, KnownAxis] = {}

    @property
    def each(self) -> list[TensorAxis]:
        """Those that are placed before the search begins, from one rank on."""
        return sorted(self._of)

    def find(self, axis: TensorAxis) -> KnownAxis:
        """Place and bound one."""
        found = tuple(map(self._bounded, self._of[axis]))
        apart = self.apart.get(axis[0], ()) if axis[1] == 1 else ()
        placed = {unit: self.prices.placed(unit) for unit in self.prices.units((axis[0], axis[1] == 1))}
        self._known[axis] = KnownAxis(axis, placed, found, self.prices.bound_apart(axis[0]) if apart else math.inf)
        return self._known[axis]

    def unplaced(self) -> Iterator[Unplaced]:
        """The others, as nodes of a search. Every axis of :attr:`each` must be known."""
        for tensor, kinds in self.apart.items():
            of_axis: dict[TensorAxis, list[Kind]] = {}
            for kind in kinds:
                of_axis.setdefault(self.prices.axis(kind.mesh), []).append(kind)
            bound = self._known[tensor, 1].apart_s
            yield from (Unplaced(axis, tuple(found), bound) for axis, found in of_axis.items())

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
        pairs = ((candidate, *next(of[self.prices.axis(candidate.mesh)])) for candidate in self.candidates)
        return {candidate.with_groups(*groups): bound for candidate, groups, bound in pairs}
