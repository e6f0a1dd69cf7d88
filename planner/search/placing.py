"""Placements of all tensor degrees and bounds of all candidates, by two processes where there is a second one."""

from __future__ import annotations

from collections import deque

from planner.search.candidates import Candidate
from planner.search.degrees import Degrees
from planner.search.helper import Helper


def bounds_of(degrees: Degrees, helper: Helper | None) -> dict[Candidate, float]:
    """Of all candidates, less the ZeRO groups that another beats: from the narrowest degree on here, from the widest on by the
    helper, which has been told of the search."""
    left = deque(degrees.tensors)
    heard = False
    while left:
        # The last one that is left is under way there, if the helper has begun at all.
        while left and helper and (found := helper.bounded(wait=heard and len(left) == 1)) is not None:
            heard = True
            if found.tensor in left:
                degrees.learn(found)
                left.remove(found.tensor)
        if left:
            if helper:
                helper.take(left[0])
            degrees.find(left.popleft())
    return degrees.bounds()
