"""The paths that bounds begin with are real: no simulation is shorter, whatever the times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cost_models.pipeline import StageTimes, longest_paths, simulate
from planner.ir.plan import ScheduleName
from planner.search.paths import Paths, start_paths
from planner.search.shape import Shape

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("gpipe", 3, 1, 4), ("1f1b", 4, 1, 6), ("interleaved-1f1b", 3, 2, 6), ("interleaved-1f1b", 4, 3, 4),
    ("interleaved-zero-bubble", 4, 1, 8), ("interleaved-zero-bubble", 3, 2, 6), ("zbv", 3, 2, 5), ("zbv", 4, 2, 9),
]


@pytest.mark.parametrize(("schedule", "pipeline", "virtual", "microbatches"), SHAPES)
def test_no_simulation_is_shorter_than_a_work_path(
    schedule: ScheduleName, pipeline: int, virtual: int, microbatches: int
) -> None:
    draw = random.Random(0)
    shape = Shape(schedule, pipeline, virtual, microbatches, 1.0)
    for _ in range(40):
        times = [StageTimes(draw.random(), draw.random() ** 3, draw.random() ** 3) for _ in range(shape.stages)]
        sends = [draw.random() / 4 for _ in range(shape.stages)]
        total_s = simulate(schedule, pipeline, virtual, microbatches, times, sends).total_s
        for path in start_paths(shape):
            assert path.seconds(times, sends) <= total_s * (1 + 1e-12)


@pytest.mark.parametrize(("schedule", "pipeline", "virtual", "microbatches"), SHAPES)
def test_longest_paths_are_paths_and_the_first_is_critical(
    schedule: ScheduleName, pipeline: int, virtual: int, microbatches: int
) -> None:
    draw = random.Random(1)
    times = [StageTimes(draw.random(), draw.random(), draw.random()) for _ in range(pipeline * virtual)]
    sends = [draw.random() / 4 for _ in times]
    length, paths = longest_paths(schedule, pipeline, virtual, microbatches, times, sends, 3)
    line = simulate(schedule, pipeline, virtual, microbatches, times, sends)
    assert length == line.total_s
    assert paths[0] == line.critical_path
    for _ in range(20):
        others = [StageTimes(draw.random(), draw.random() ** 2, draw.random()) for _ in times]
        total_s = simulate(schedule, pipeline, virtual, microbatches, others, sends).total_s
        assert all(path.seconds(others, sends) <= total_s * (1 + 1e-12) for path in paths)


def test_known_paths_are_as_long_as_they_say() -> None:
    """The lengths of all known paths at once, and the longest of them in order."""
    shape = Shape("interleaved-1f1b", 3, 2, 6, 1.0)
    paths, draw = Paths(shape), np.random.default_rng(5)
    times = draw.uniform(1.0, 2.0, (shape.stages, 3))
    stages, sends = [StageTimes(*map(float, row)) for row in times], np.append(0.0, draw.uniform(0.1, 0.5, shape.stages - 1))
    _, found = longest_paths(shape.schedule, shape.pipeline, shape.virtual, shape.microbatches, stages, sends, 4)
    places = paths.add([*found, *start_paths(shape)])
    assert places == [*range(3, 3 + len(found)), 0, 1, 2], "a path that is known keeps its place"
    seconds = paths.seconds(times, sends)
    assert seconds == pytest.approx([path.seconds(stages, sends) for path in paths.all], rel=1e-12)
    order = sorted(range(len(seconds)), key=lambda at: -seconds[at])
    assert paths.longest(seconds, 0.0, 3).tolist() == order[:3]
    assert paths.longest(seconds, float(seconds[order[0]]), 3).tolist() == []
