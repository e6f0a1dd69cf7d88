"""From candidate to neighbouring candidate: which are near, and where a climb ends."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from planner.ir.plan import Mesh
from planner.search import climb as climbing
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.climb import Climb
from planner.search.request import Request, as_it_is
from tests.search.made import make_cluster, make_graph

CANDIDATES = enumerate_candidates(make_graph("abbbbbbbbc"), make_cluster(8, 1000), Request(24, 4, "fp32"))


def test_what_is_near() -> None:
    climb = Climb(dict.fromkeys(CANDIDATES, 1.0), cast(Any, None), lambda: math.inf, as_it_is)
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "1f1b", 1, 2)
    near = set(climb._neighbours(start))
    of_mesh = {c for c in near if c.mesh == start.mesh}
    assert {c.micro for c in of_mesh} == {1, 2, 3}
    every = {(c.schedule, c.virtual) for c in CANDIDATES if c.mesh == start.mesh and c.micro == 2}
    assert {(c.schedule, c.virtual) for c in of_mesh if c.micro == 2} == every
    moved = {(c.mesh.pipeline, c.mesh.data, c.mesh.tensor) for c in near - of_mesh}
    assert moved == {(1, 4, 2), (1, 2, 4), (4, 1, 2), (2, 1, 4), (4, 2, 1), (2, 4, 1)}
    assert all(c.zero_group == c.mesh.data for c in near)


def test_a_climb_ends_where_no_neighbour_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that fall towards one candidate, from every other; none is probed twice."""
    goal = Candidate(Mesh(pipeline=4, data=2, tensor=1), 3, 4, "interleaved-1f1b", 2, 2)
    assert goal in CANDIDATES
    best, probed = [math.inf], []

    def improves(self: Climb, candidate: Candidate, deadline: float) -> bool:
        assert candidate not in self._probed
        self._probed.add(candidate)
        probed.append(candidate)
        step_s = _distance(candidate, goal)
        better = step_s < best[0]
        best[0] = min(best[0], step_s)
        return better

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    start = next(c for c in CANDIDATES if c.mesh == Mesh(pipeline=1, data=8, tensor=1))
    Climb(dict.fromkeys(CANDIDATES, 1.0), cast(Any, None), lambda: best[0], as_it_is).go(start, math.inf)
    assert best[0] == 0.0 and goal in probed
    assert len(probed) < len(CANDIDATES)


def _distance(a: Candidate, b: Candidate) -> float:
    degrees = [(getattr(a.mesh, name), getattr(b.mesh, name)) for name in climbing.AXES]
    apart = sum(abs(math.log(x / y)) for x, y in [*degrees, (a.micro, b.micro), (a.virtual, b.virtual)])
    return apart + 0.1 * (a.schedule != b.schedule)
