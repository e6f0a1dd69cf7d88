"""Placements of all tensor degrees at once, by two processes where there is a second one."""

from __future__ import annotations

from collections import deque

from planner.search.helper import Helper
from planner.search.prices import Prices


def place(prices: Prices, helper: Helper | None) -> None:
    """Place what the search will ask for: here from the first on, by the helper from the last on."""
    left = deque(prices.unplaced)
    if helper is None or len(left) < 2:
        return  # Whoever asks for them is first.
    helper.place(prices.graph, prices.cluster, tuple(reversed(left)))
    heard = False
    while left:
        # The last one that is left is under way there, if the helper has begun at all.
        while left and (found := helper.placed(wait=heard and len(left) == 1)) is not None:
            heard = True
            if found.unit in left:
                prices.learn(found.unit, found.placements)
                left.remove(found.unit)
        if left:
            helper.take(left[0])
            prices.placed(left.popleft())
