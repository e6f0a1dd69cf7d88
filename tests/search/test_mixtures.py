"""The best mixture of a schedule's paths: valid under any times, and as strong as all paths together."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from cost_models.pipeline import CriticalPath, StageTimes, dependencies, longest_paths, simulate
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.effort import AGREEMENT, Effort
from planner.search.mixtures import MOST_ACTIONS, _network, best_mixture, grains, mixing_seconds
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
    check_path(counts.paths.all[-1], key, np.random.default_rng(seed), 50)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_one_mixture_says_what_paths_added_one_by_one_say(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    shape = Shape(*key, streams.CAPACITY)
    mixed, cut = program(seed, shape), program(seed, shape)
    mixed.restrict(math.inf)
    assert mixed._mixed(effort(), grains(shape)[-1])
    (answer, _), (far, agreed) = mixed.look(effort()), (None, False)
    while not agreed:
        far, agreed = cut.look(effort())
    assert far is not None
    assert answer.bound == pytest.approx(far.bound, rel=3 * AGREEMENT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_paths_that_change_at_few_micro_batches_are_paths(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    """No step is shorter than a mixture of them, more micro-batches say more, and all of them what all paths say."""
    shape = Shape(*key, streams.CAPACITY)
    counts = program(seed, shape)
    counts.restrict(math.inf)
    model = counts._model()
    rows = [row for row in model.rows if row.lasting]
    generator = np.random.default_rng(seed)
    said = []
    for grain in grains(shape):
        found = best_mixture(counts.layout, rows, model.cost, model.low, model.high, 60.0, grain)
        assert found is not None
        said.append(float(found.values[[LENGTH, TAIL]].sum()))
        check_path(found.path, key, generator, 20)
    far, agreed = None, False
    while not agreed:
        far, agreed = counts.look(effort())
    assert far is not None
    assert all(more >= fewer * (1 - AGREEMENT) for fewer, more in pairwise(said))
    assert said[-1] == pytest.approx(far.bound, rel=3 * AGREEMENT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("key", SHAPES, ids=IDS)
def test_columns_for_ends_say_what_the_best_mixture_says(key: tuple, seed: int) -> None:  # type: ignore[type-arg]
    """Of paths that change at as few micro-batches; wherever the solver begins, and whatever was bounded meanwhile."""
    shape = Shape(*key, streams.CAPACITY)
    counts = program(seed, shape)
    counts.restrict(math.inf)
    counts._tell_whole()
    model = counts._model()
    found = best_mixture(counts.layout, list(model.rows), model.cost, model.low, model.high, 60.0, grains(shape)[0])
    assert found is not None and counts.widen()
    least, agreed = counts.look(effort())
    assert agreed and least.bound == pytest.approx(float(found.values[[LENGTH, TAIL]].sum()), rel=3 * AGREEMENT)

    corner, column = counts.corner, int(counts.layout.n_at[len(counts.layout.n_at) // 2])
    assert corner is not None
    ends = counts.sides(column)
    counts.bound_column(column, 2.0, 2.0)
    bounded, _ = counts.look(effort())
    assert bounded.bound >= least.bound * (1 - 1e-9)
    counts.paths.add(longest_paths(*key, [StageTimes(1.0, 1.0, 1.0)] * shape.stages, [0.0] * shape.stages, 3)[1])
    counts.recall()
    counts.bound_column(column, *ends)
    counts.begin(corner)
    again, _ = counts.look(effort())
    assert again.bound == pytest.approx(least.bound, rel=1e-6)


def test_few_micro_batches_make_a_program_smaller() -> None:
    """Two of 24 are told apart: a row for each of them at most, where all take two."""
    few, every = (_network("interleaved-1f1b", 24, 2, 24, grain) for grain in (2, 24))
    assert every.count > 500 and few.count < every.count / 8 and len(few.goal) < len(every.goal) / 4


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
    assert math.isinf(mixing_seconds(Shape("1f1b", stages, 1, MOST_ACTIONS // stages, 1.0), 2))
    assert mixing_seconds(Shape("1f1b", stages, 1, 32, 1.0), stages) < 1
