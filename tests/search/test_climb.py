"""From candidate to neighbouring candidate: which are near, and where a climb ends."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.ir.plan import Batch, Mesh, Schedule
from planner.search import climb as climbing
from planner.search.best import Best
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.climb import Climb
from planner.search.nodes import Sketch
from planner.search.request import Request, as_it_is
from tests.search.made import make_cluster, make_graph

CANDIDATES = enumerate_candidates(make_graph("abbbbbbbbc"), make_cluster(8, 1000), Request(24, 4, "fp32"))


def test_what_is_near() -> None:
    climb = Climb(dict.fromkeys(CANDIDATES, 1.0), cast(Any, None), Best(0.0, as_it_is))
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "1f1b", 1, ((2,),))
    near = set(climb._neighbours(start))
    of_mesh = {c for c in near if c.mesh == start.mesh}
    assert {c.micro for c in of_mesh} == {1, 2, 3}
    every = {(c.schedule, c.virtual) for c in CANDIDATES if c.mesh == start.mesh and c.micro == 2}
    assert {(c.schedule, c.virtual) for c in of_mesh if c.micro == 2} == every
    moved = {(c.mesh.pipeline, c.mesh.data, c.mesh.tensor) for c in near - of_mesh}
    assert moved == {(1, 4, 2), (1, 2, 4), (4, 1, 2), (2, 1, 4), (4, 2, 1), (2, 4, 1)}


def test_as_many_stages_on_other_ranks() -> None:
    """A factor moved from pipeline ranks to virtual stages or the other way round: it is looked at last."""
    climb = Climb(dict.fromkeys(CANDIDATES, 1.0), cast(Any, None), Best(0.0, as_it_is))
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "interleaved-1f1b", 4, ((2,),))
    near = set(climb._restaged(start))
    assert {(c.mesh.pipeline, c.virtual) for c in near} == {(4, 2), (2, 4)}
    assert {(c.mesh.data, c.mesh.tensor) for c in near if c.mesh.pipeline == 4} == {(1, 2), (2, 1)}
    assert all(c.schedule == start.schedule and (c.micro == 2 or c.accumulation == 6) for c in near)


def test_the_nearest_of_a_kind() -> None:
    """Of many virtual stages those that are nearly as many, one of each kind before the second of any, by bound."""
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "interleaved-1f1b", 3, ((2,),))
    kind = [replace(start, virtual=virtual) for virtual in (2, 3, 4, 5, 6, 7)]
    other = [replace(start, micro=1, accumulation=12, virtual=virtual) for virtual in (1, 2, 7)]
    bounds = dict.fromkeys(kind, 2.0) | dict.fromkeys(other, 1.0)
    found = Climb(bounds, cast(Any, None), Best(0.0, as_it_is))._nearest(start, bounds)
    assert [(c.micro, c.virtual) for c in found] == [(1, 2), (2, 3), (1, 1), (2, 2), (1, 7), (2, 4), (2, 5)]
    assert climbing.OF_A_KIND == 4


def test_near_cuts_are_looked_at_again_from_a_quicker_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schedules with other virtual stages, as long as that leads on; each once."""
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "interleaved-1f1b", 1, ((2,),))
    of_mesh = [replace(start, virtual=virtual) for virtual in range(1, 20)]
    best = Best(0.0, as_it_is)
    climb, looked = Climb(dict.fromkeys(of_mesh, 0.0), cast(Any, None), best), list[int]()

    def improves(self: Climb, sketch: Sketch, deadline: float, *, moving: int) -> bool:
        virtual = sketch.candidate.virtual
        looked.append(virtual)
        self._step(_plan(sketch.candidate), cast(Any, _Seen(abs(virtual - 10.2) + 1)))
        return True

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    best.keep(_plan(start), cast(Any, _Seen(20.0)))
    climb._look_near(math.inf, 1)
    assert sorted(looked) == list(range(1, 12)) and best.step_s == pytest.approx(1.2)


def test_a_wide_climb_goes_uphill_in_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mesh begins with a plan slower than the best, only what leads uphill in it finds the quicker one at its end."""
    meshes = [Mesh(pipeline=2, data=2, tensor=2), Mesh(pipeline=4, data=2)]
    start = Candidate(meshes[0], 2, 6, "interleaved-1f1b", 1, ((2,),))
    every = [replace(start, mesh=mesh, virtual=virtual) for mesh in meshes for virtual in range(1, 9)]
    best = Best(0.0, as_it_is)
    best.keep(_plan(start), cast(Any, _Seen(10.0)))
    probed, moved = list[Candidate](), list[tuple[Candidate, int]]()

    def improves(self: Climb, sketch: Sketch, deadline: float, *, moving: int = 0) -> bool:
        before = self.target_s
        (moved.append((sketch.candidate, moving)) if moving else probed.append(sketch.candidate))
        self._probed.add(sketch.candidate)
        slope = 20.0 if sketch.candidate.mesh == meshes[1] else 40.0
        if not moving:
            self._step(_plan(sketch.candidate), cast(Any, _Seen(slope - 2 * sketch.candidate.virtual)))
        return self.target_s < before

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    bounds = {each: float(each.virtual) for each in every} | {every[0]: 11.0}
    Climb(dict.fromkeys(every, 0.0), cast(Any, None), best).widely(bounds, math.inf)
    assert best.step_s == pytest.approx(4.0) and best.found is not None
    assert (best.found[0].mesh, best.found[0].schedule.virtual) == (meshes[1], 8)
    assert {candidate.mesh for candidate in probed} == set(meshes) and every[0] not in probed
    assert moved and {candidate.mesh for candidate, _ in moved} == {meshes[1]}
    assert {moving for _, moving in moved} == {climbing.MANY_MOVES}


def _plan(candidate: Candidate) -> Any:
    """As far as climbs look at it."""
    return SimpleNamespace(
        mesh=candidate.mesh, batch=Batch(24, candidate.micro, candidate.accumulation),
        schedule=Schedule(candidate.schedule, candidate.virtual),
    )


def test_a_climb_ends_where_no_neighbour_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that fall towards one candidate, from every other; none is probed twice."""
    goal = Candidate(Mesh(pipeline=4, data=2, tensor=1), 3, 4, "interleaved-1f1b", 2, ((2,),))
    assert goal in CANDIDATES
    best, probed = [math.inf], []

    def improves(self: Climb, sketch: Sketch, deadline: float) -> bool:
        assert sketch.candidate not in self._probed
        self._probed.add(sketch.candidate)
        probed.append(sketch.candidate)
        step_s = _distance(sketch.candidate, goal)
        better = step_s < best[0]
        best[0] = min(best[0], step_s)
        return better

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    start = next(c for c in CANDIDATES if c.mesh == Mesh(pipeline=1, data=8, tensor=1))
    Climb(dict.fromkeys(CANDIDATES, 1.0), cast(Any, None), Best(0.0, as_it_is)).go(start, math.inf)
    assert best[0] == 0.0 and goal in probed
    assert len(probed) < len(CANDIDATES)


def test_steps_over_virtual_stages_get_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many virtual stages too many are not left one by one."""
    start = Candidate(Mesh(pipeline=2, data=2, tensor=2), 2, 6, "interleaved-1f1b", 64, ((2,),))
    kind = [replace(start, virtual=virtual) for virtual in range(1, 65)]
    best, probed = [math.inf], list[int]()

    def improves(self: Climb, sketch: Sketch, deadline: float) -> bool:
        self._probed.add(sketch.candidate)
        probed.append(sketch.candidate.virtual)
        step_s = abs(sketch.candidate.virtual - 20)
        better = step_s < best[0]
        best[0] = min(best[0], step_s)
        return better

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    Climb(dict.fromkeys(kind, 1.0), cast(Any, None), Best(0.0, as_it_is)).go(start, math.inf)
    assert probed[:6] == [64, 63, 61, 57, 49, 33]
    assert best[0] == 0.0
    assert len(probed) < 25


class _Seen:
    """A prediction, as far as climbs look at it."""

    def __init__(self, step_s: float, *, fits: bool = True) -> None:
        self.step_s, self.fits = step_s, fits


@pytest.mark.parametrize(
    ("too_large", "kept_s"), [((), 1.0), ((1.0,), 2.0), ((1.0, 2.0), 3.0), ((1.0, 2.0, 3.0, 4.0), math.inf)]
)
def test_only_what_a_climb_ends_with_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, too_large: tuple[float, ...], kept_s: float
) -> None:
    """And what came before it, from the last on, as far as the closer look finds that it does not fit."""
    looked: list[float] = []

    def look(plan: Any, prediction: Any) -> Any:
        looked.append(prediction.step_s)
        return _Seen(prediction.step_s, fits=prediction.step_s not in too_large)

    best = Best(0.0, look)
    climb = Climb(dict.fromkeys(CANDIDATES, 0.5), cast(Any, None), best)
    steps = iter([4.0, 3.0, 5.0, 2.0, 1.0])

    def improves(self: Climb, sketch: Sketch, deadline: float) -> bool:
        self._probed.add(sketch.candidate)
        before, step_s = self.target_s, next(steps, 6.0)
        self._step(cast(Any, None), cast(Any, _Seen(step_s)))
        return self.target_s < before

    monkeypatch.setattr(climbing.Climb, "_improves", improves)
    climb.go(CANDIDATES[0], math.inf)
    assert best.step_s == kept_s
    assert looked == [1.0, 2.0, 3.0, 4.0][: len(looked)] and len(looked) == min(4, 1 + len(too_large))


def _distance(a: Candidate, b: Candidate) -> float:
    degrees = [(getattr(a.mesh, name), getattr(b.mesh, name)) for name in climbing.AXES]
    apart = sum(abs(math.log(x / y)) for x, y in [*degrees, (a.micro, b.micro), (a.virtual, b.virtual)])
    return apart + 0.1 * (a.schedule != b.schedule)
