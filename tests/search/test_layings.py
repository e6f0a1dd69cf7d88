"""Where blocks lie, told apart by what ranks take in all: against every plan."""

from __future__ import annotations

import itertools
import math
from typing import Never

import numpy as np
import pytest

from planner.ir.plan import ScheduleName
from planner.search import layings as layings_module
from planner.search.choices import Chosen
from planner.search.counted import Ranks
from planner.search.layings import Layings, layings_of, relaxed
from planner.search.paths import Paths
from planner.search.patterns import Patterns
from planner.search.tables import Table
from planner.search.works import works
from tests.search.test_choices import ROOMY, Leaf

SHAPES: list[tuple[tuple[ScheduleName, int, int, int], str]] = [
    (("1f1b", 3, 1, 4), "ebbbbh"), (("interleaved-1f1b", 2, 2, 4), "ebbbbbh"), (("interleaved-1f1b", 2, 2, 2), "bbbbbh"),
    (("interleaved-zero-bubble", 2, 2, 4), "ebbbbh"), (("zbv", 2, 2, 4), "ebbbbb"),
]


def unheard(_: Chosen) -> Never:
    raise AssertionError


def never() -> bool:
    return False


def layings_between(leaf: Leaf, target_s: float) -> tuple[Layings | None, Patterns]:
    ranks = Ranks(leaf.stream, leaf.shape, works(leaf.stream, leaf.shape.microbatches))
    patterns = Patterns(ranks)
    return layings_of(patterns, ranks.sharper(target_s), Paths(leaf.shape), target_s), patterns


@pytest.mark.parametrize("memory", [ROOMY, 400, 330])
@pytest.mark.parametrize(("key", "blocks"), SHAPES, ids=str)
def test_no_laying_of_a_quicker_plan_is_left_out(
    key: tuple[ScheduleName, int, int, int], blocks: str, memory: int
) -> None:
    stages, left_out = key[1] * key[2], 0
    for seed in range(3):
        best: dict[tuple[int, ...], float] = {}
        for inner in itertools.combinations(range(1, len(blocks)), stages - 1):
            cuts = (0, *inner, len(blocks))
            steps = Leaf(key, seed, memory, blocks=blocks, cuts=cuts).steps()
            if steps:
                best[cuts] = min(steps)
        leaf = Leaf(key, seed, memory, blocks=blocks)
        for target_s in {min(best.values()) * 1.001, float(np.median(list(best.values())))} if best else {1e9}:
            layings, patterns = layings_between(leaf, target_s)
            if layings is None:  # The sums of ranks leave none.
                assert not any(seconds < target_s for seconds in best.values())
                continue
            assert layings.go(target_s, never, unheard) == (target_s, True)
            found = {patterns.cuts(np.array(counts)) for counts in layings.found}
            assert {cuts for cuts, seconds in best.items() if seconds < target_s} <= found
            left_out += len(best) - len(found)
    assert left_out > 5 or not best


def test_a_laying_is_found_once() -> None:
    """However many choices its ranks have that are quick enough."""
    blocks = "ebbbbbbbbh"
    layings, _ = layings_between(Leaf(SHAPES[1][0], 0, 600, blocks=blocks), 1e9)
    assert layings is not None
    every = math.prod(len(ways.blocks) for ways in layings.ways)
    assert layings.go(1e9, never, unheard) == (1e9, True)
    assert len(layings.found) == math.comb(len(blocks) - 1, 3) < every / 200
    assert layings.simulated < every / 5


def test_choices_count_as_better_than_they_are() -> None:
    """Those of single blocks as one; of the run's those that are nearly the same."""
    leaf = Leaf(SHAPES[1][0], 0, ROOMY, blocks=SHAPES[1][1])
    _, patterns = layings_between(leaf, 1e9)
    alike = Table(np.array([
        [1.0, 1.0, 1.0, 0, 0, 0, 100.0, 0], [1.0, 1.001, 1.0, 0, 0, 0, 99.5, 0], [1.0, 2.0, 1.0, 0, 0, 0, 10.0, 0],
    ]), np.array([5.0, 4.0, 6.0]), np.zeros(3), ("none", "selective", "full"))
    joined = layings_module._joined(alike)
    assert joined.names == ("none", "full")
    assert joined.sums[0].tolist() == [1.0, 1.0, 1.0, 0, 0, 0, 99.5, 0] and joined.peaks.tolist() == [4.0, 6.0]
    for before, after in zip(leaf.stream.single, relaxed(patterns).single, strict=True):
        for table, better in zip(before, after, strict=True):
            at_least = (better.columns[:, None] <= table.columns).all(axis=2)
            assert at_least.any(axis=0).all()
            assert len(better.names) == 1 or len(better.names) == len(table.names)


def test_too_many_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf(SHAPES[1][0], 0, ROOMY, blocks=SHAPES[1][1])
    layings, _ = layings_between(leaf, 1e9)
    assert layings is not None
    layings.simulated, layings.most_actions = 1, 0
    assert layings.go(1e9, never, unheard) == (1e9, False)
    monkeypatch.setattr(layings_module, "AT_FIRST", 0)
    assert layings_between(leaf, 1e9)[0] is None
    monkeypatch.setattr(layings_module, "AT_FIRST", 10**12)
    monkeypatch.setattr(layings_module, "MOST_LAYINGS", 1)
    assert layings_between(leaf, 1e9)[0] is None
