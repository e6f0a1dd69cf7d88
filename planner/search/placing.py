"""Placements over all tensor axes and bounds of all candidates, by two processes where there is a second one."""

from __future__ import annotations

from collections import deque

from planner.search.candidates import Candidate
from planner.search.helper import Helper
from planner.search.tensor_axes import TensorAxes


def bounds_of(axes: TensorAxes, helper: Helper | None) -> dict[Candidate, float]:
    """Of all candidates, less the ZeRO groups that another beats: from the narrowest axis on here, from the widest on by the
    helper, which has been told of the search."""
    left = deque(axes.each)
    heard = False
    while left:
        # The last one that is left is under way there, if the helper has begun at all.
        while left and helper and (found := helper.bounded(wait=heard and len(left) == 1)) is not None:
            heard = True
            if found.axis in left:
                axes.learn(found)
                left.remove(found.axis)
        if left:
            if helper:
                helper.take(left[0])
            axes.find(left.popleft())
    return axes.bounds()
