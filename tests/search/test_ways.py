"""Ways of a rank: options of its stages against every combination of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.search.tables import pareto
from planner.search.ways import _Joined, _Options


def _random_options(random: np.random.Generator, number: int) -> _Options:
    blocks = random.integers(0, 4, number)
    held, took = random.integers(1, 10, (number, 2)).astype(float), random.integers(1, 10, number).astype(float)
    named = np.arange(number)[:, None, None]  # So that it is known which are left.
    return _Options(np.zeros(1, dtype=np.int64), named, blocks, held, took, np.column_stack([took, held]))


def _legal(joined: _Joined) -> set[tuple[int, ...]]:
    """Every combination that fits, is quick enough and has as many blocks as it may, by names of options."""
    found = set()
    for chosen in itertools.product(*(range(len(option.blocks)) for option in joined.options)):
        pairs = list(zip(joined.options, chosen, strict=True))
        held = sum(option.held[at] for option, at in pairs)
        blocks = sum(int(option.blocks[at]) for option, at in pairs)
        took = sum(option.took[at] for option, at in pairs)
        if (held <= joined.room).all() and took <= joined.limit_s and joined.blocks[0] <= blocks <= joined.blocks[1]:
            found.add(tuple(int(option.counts[at, 0, 0]) for option, at in pairs))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_way_is_lost_with_the_options_that_go_with_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    stages = int(random.integers(1, 4))
    options = [_random_options(random, int(random.integers(1, 7))) for _ in range(stages)]
    every = _Joined(options, float(random.integers(4, 8 * stages)), float(random.integers(4, 8 * stages)), (stages, 2 * stages))
    left = _Joined(every.possible, every.room, every.limit_s, every.blocks)
    assert left.ways is not None
    named = [option.counts[chosen, 0, 0] for option, chosen in zip(left.options, left.ways.T, strict=True)]
    assert {tuple(map(int, way)) for way in zip(*named, strict=True)} == _legal(every) == _legal(left)


def test_options_that_go_with_nothing_are_left_out() -> None:
    random = np.random.default_rng(0)
    options = [_random_options(random, 6) for _ in range(2)]
    least = [min(zip(option.took, option.blocks, strict=True)) for option in options]
    limit_s = float(sum(took for took, _ in least))
    joined = _Joined(options, 100.0, limit_s, (0, 6))
    assert [sorted(set(option.took.tolist())) for option in joined.possible] == [[took] for took, _ in least]
    with_more = _Joined(options, 100.0, 100.0, (6, 6))
    assert [option.blocks.tolist() for option in with_more.possible] == [
        [3] * int((option.blocks == 3).sum()) for option in options
    ]
    assert all((option.blocks == 3).any() for option in options)


def test_rows_that_beat_each_other_nowhere_are_not_all_compared() -> None:
    """What is left contains all that no other beats, and where some are beaten, nothing else."""
    apart = np.column_stack([np.arange(100.0), np.arange(100.0)[::-1]])
    assert list(pareto(apart, 5)) == list(range(100))
    random = np.random.default_rng(0)
    mixed = random.integers(0, 20, (400, 2)).astype(float)
    exact = set(pareto(mixed).tolist())
    assert set(pareto(mixed, 3).tolist()) == exact
    few = np.concatenate([apart, apart[:4] + 0.5])
    assert set(pareto(few).tolist()) == set(range(100))
    assert set(pareto(few, 5).tolist()) >= set(range(100))
