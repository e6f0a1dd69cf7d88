"""The candidates of a search by tensor axis: how each is placed, and bounds of its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ir.plan import TensorAxis
from planner.search.candidates import Candidate, Candidates, Groups, Kind
from planner.search.prices import Placements, Prices, Unit, split_of


@dataclass(frozen=True)
class KnownAxis:
    """What is known of a tensor axis. ``placed``: by unit; ``bounds``: of each of its candidates, in their order, the ZeRO
    groups that no other beats, and a bound of the step; ``apart``: other axes of as many ranks that are not nearest each other,
    which are placed too, each with one bound."""

    axis: TensorAxis
    placed: Mapping[Unit, tuple[Placements, ...]]
    bounds: tuple[tuple[Groups, float], ...]
    apart: Mapping[TensorAxis, float]


@dataclass(frozen=True)
class Apart:
    """Candidates over a tensor axis whose ranks are not nearest each other, with a ``bound`` of their step."""

    kinds: tuple[Kind, ...]
    bound: float

    def bounds(self, prices: Prices) -> dict[Candidate, float]:
        """Of each of them, less the ZeRO groups that another beats."""
        less = (prices.without_beaten(candidate) for kind in self.kinds for candidate in kind.candidates)
        return {candidate: max(self.bound, prices.bound(candidate)) for candidate in less}


class TensorAxes:
    """All of them. ``prices``: of the ``candidates``."""

    def __init__(self, prices: Prices, candidates: Candidates) -> None:
        self.prices = prices
        self.candidates = [candidate for kind in candidates.nearest for candidate in kind.candidates]
        self._of: dict[TensorAxis, list[Candidate]] = {}
        for candidate in self.candidates:
            self._of.setdefault(prices.axis(candidate.mesh), []).append(candidate)
        self._apart: dict[TensorAxis, list[Kind]] = {}
        for kind in candidates.apart:
            self._apart.setdefault(prices.axis(kind.mesh), []).append(kind)
        self._known: dict[TensorAxis, KnownAxis] = {}

    @property
    def each(self) -> list[TensorAxis]:
        """Those that are placed before the search begins, from one rank on."""
        return sorted(self._of)

    def find(self, axis: TensorAxis) -> KnownAxis:
        """Place and bound one, and those of as many ranks that are apart."""
        tensor, stride = axis
        bounds = tuple(map(self._bounded, self._of[axis]))
        apart = {other: self.prices.bound_over(other) for other in self._apart if other[0] == tensor and stride == 1}
        splits = {split_of(axis), *map(split_of, apart)}
        placed = {unit: self.prices.placed(unit) for split in splits for unit in self.prices.units(split)}
        self._known[axis] = KnownAxis(axis, placed, bounds, apart)
        return self._known[axis]

    def apart(self) -> Iterator[Apart]:
        """The others, as nodes of a search. Every axis of :attr:`each` must be known."""
        for axis, kinds in self._apart.items():
            yield Apart(tuple(kinds), self._known[axis[0], 1].apart[axis])

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
