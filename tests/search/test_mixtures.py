"""The best mixture of a schedule's paths: valid under any times, and as strong as all paths together."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from cost_models.pipeline import CriticalPath, StageTimes, dependencies, longest_paths, simulate
from planner.search.counted import Ranks
from planner.search.counts import AGREEMENT, Counts, Effort
from planner.search.mixtures import MOST_ACTIONS, best_mixture, mixing_seconds
from planner.search.rows import LENGTH, TAIL
from planner.search.shape import Shape
from planner.search.works import works
from tests.search import streams
from tests.search.test_patterns import SHAPES

IDS = [str(shape) for shape in SHAPES]


def program(seed: int, shape: Shape) -> Counts:
    stream = streams.draw(seed, blocks=shape.stages + 5)
    return Counts(Ranks(stream, shape, works(stream, shape.microbatches)), {})


def effort(seconds: float = 60.0) -> Effort:
    return Effort(math.inf, time.perf_counter() + seconds)


def check_path(path: CriticalPath, key: tuple, generator: np.random.Generator, draws: int) -> None:  # type: ignore[type-arg]
    """No step is shorter, under any times."""
    count = key[1] * key[2]
    for times in generator.uniform(0.0, 3.0, (draws, count, 3)):
        stages = [StageTimes(*map(float, row)) for row in times]
        sends = [0.0] + [float(generator.uniform(0.0, 0.5))] * (count - 1)
        assert path.seconds(stages, sends) <= simulate(*key, stages, sends).total_s * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_no_step_is_shorter_than_a_mixture(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    """Under times that have nothing to do with those it was made for, too."""
    shape = Shape(*key, streams.CAPACITY)
    counts = program(seed, shape)
    counts.restrict(math.inf)
    counts.mix(effort())
    check_path(counts.pool[shape][-1], key, np.random.default_rng(seed), 50)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_one_mixture_says_what_paths_added_one_by_one_say(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    shape = Shape(*key, streams.CAPACITY)
    mixed, cut = program(seed, shape), program(seed, shape)
    mixed.restrict(math.inf)
    mixed.mix(effort())
    (answer, _), (far, agreed) = mixed.look(effort()), (None, False)
    while not agreed:
        far, agreed = cut.look(effort())
    assert far is not None
    assert answer.bound == pytest.approx(far.bound, rel=3 * AGREEMENT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_paths_near_a_solution_are_paths(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    """No step is shorter than a mixture of them, and all paths together say no less; near the solution itself, as much."""
    shape = Shape(*key, streams.CAPACITY)
    counts = program(seed, shape)
    counts.restrict(math.inf)
    counts.mix(effort())
    every_s, times = counts.mixed_s, counts.layout.times(counts.inner)  # type: ignore[arg-type]
    model = counts._model()
    rows = [row for row in model.rows if row.lasting]
    generator = np.random.default_rng(seed)
    elsewhere = times * generator.uniform(0.5, 1.5, times.shape)
    for near, rel in (([times], 3 * AGREEMENT), ([elsewhere], math.inf), ([elsewhere, times], 3 * AGREEMENT)):
        found = best_mixture(counts.layout, rows, model.cost, model.low, model.high, 60.0, near)
        assert found is not None
        said_s = float(found.values[[LENGTH, TAIL]].sum())
        assert every_s * (1 - rel) <= said_s <= every_s * (1 + AGREEMENT)
        check_path(found.path, key, generator, 20)


def test_dependencies_say_what_a_simulation_does() -> None:
    key = ("interleaved-1f1b", 3, 2, 6)
    known = dependencies(*key)
    times = np.random.default_rng(0).uniform(0.5, 2.0, (6, 3))
    seconds = np.column_stack([times, times[:, 1] + times[:, 2]])
    ends = np.zeros(len(known.stage))
    for target, source, cut in zip(known.target, known.source, known.cut, strict=True):
        begun = ends[source] if source >= 0 else 0.0
        ends[target] = max(ends[target], begun + (0.25 if cut else 0.0) + seconds[known.stage[target], known.kind[target]])
    length, _ = longest_paths(*key, [StageTimes(*map(float, row)) for row in times], [0.25] * 6, 1)
    assert ends[known.last].max() == pytest.approx(length, rel=1e-12)


def test_long_schedules_are_left_to_paths() -> None:
    stages = 16
    assert math.isinf(mixing_seconds(Shape("1f1b", stages, 1, MOST_ACTIONS // stages, 1.0)))
    assert mixing_seconds(Shape("1f1b", stages, 1, 32, 1.0)) < 1
