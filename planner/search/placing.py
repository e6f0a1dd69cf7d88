"""Placements of all tensor degrees and bounds of all candidates, by two processes where there is a second one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.search.candidates import Candidate
from planner.search.helper import Helper
from planner.search.prices import Prices


@dataclass
class Bounds:
    """A bound of every candidate, less the ZeRO groups that another beats, one tensor degree after the other."""

    prices: Prices
    candidates: Sequence[Candidate]
    _left: dict[int, list[int]] = field(init=False)
    _found: list[tuple[Candidate, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._found = defaultdict(list), [(candidate, 0.0) for candidate in self.candidates]
        for at, candidate in enumerate(self.candidates):
            self._left[candidate.mesh.tensor].append(at)

    def some(self) -> bool:
        """Those of a tensor degree that is placed; whether there was one."""
        waits = {tensor for tensor, _ in self.prices.unplaced}
        tensor = next((tensor for tensor in self._left if tensor not in waits), None)
        if tensor is not None:
            self._bound(self._left.pop(tensor))
        return tensor is not None

    def all(self) -> dict[Candidate, float]:
        """Of all candidates, in their order."""
        while self._left:
            self._bound(self._left.popitem()[1])
        return dict(self._found)

    def _bound(self, places: Sequence[int]) -> None:
        for at in places:
            less = self.prices.without_beaten(self.candidates[at])
            self._found[at] = less, self.prices.bound(less)


def place(prices: Prices, helper: Helper | None, meanwhile: Callable[[], bool]) -> None:
    """Place what the search will ask for: by the helper from the last on, and from the first on here, where there is nothing
    else to do ``meanwhile()``, which says whether there was something."""
    left = deque(prices.unplaced)
    if helper is None or len(left) < 2:
        return  # Whoever asks for them is first.
    helper.place(prices.graph, prices.cluster, tuple(reversed(left)))
    heard = False
    while left:
        busy = meanwhile()
        # The last one that is left is under way there, if the helper has begun at all.
        while left and (found := helper.placed(wait=heard and len(left) == 1 and not busy)) is not None:
            heard = True
            if found.unit in left:
                prices.learn(found.unit, found.placements)
                left.remove(found.unit)
        if left and not busy:
            helper.take(left[0])
            prices.placed(left.popleft())
