"""The paths that bounds begin with are real: no simulation is shorter, whatever the times."""

from __future__ import annotations

import random

import pytest

from cost_models.pipeline import StageTimes, longest_paths, simulate
from planner.ir.plan import ScheduleName
from planner.search.paths import start_paths
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
