"""How slow the slowest stage of a rank is: no plan of whole blocks is excluded, and parts of blocks are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cost_models.pipeline import lengths
from planner.ir.plan import ScheduleName
from planner.search.linear import Floats, Indices
from planner.search.rows import LENGTH, Layout
from planner.search.shape import Shape
from planner.search.slowest import Slowest, between
from planner.search.tables import INPUT_GRADIENT
from tests.search import streams
from tests.search.plans import drawn, needed_bytes

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("interleaved-1f1b", 2, 2, 2), ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 2, 6), ("interleaved-1f1b", 2, 3, 4),
    ("interleaved-zero-bubble", 2, 2, 4), ("zbv", 2, 2, 5),
]
MORE = 3
"""Blocks beyond one for each stage."""


def _timed(layout: Layout, values: Floats) -> Floats:
    """The same with the times of the passes and the length of the pipeline."""
    times, values = layout.times(values), values.copy()
    kept = times if layout.passes == 3 else np.column_stack([times[:, 0], times[:, 1] + times[:, 2]])
    values[layout.time_at(0, 0) + np.arange(kept.size)] = kept.ravel()
    values[LENGTH] = lengths(*layout.shape.timetable, times[None], layout.crossings.sends_s)[0]
    return values


def _layout(seed: int, key: tuple[ScheduleName, int, int, int], capacity_bytes: float = streams.CAPACITY) -> Layout:
    stream = streams.draw(seed, blocks=key[1] * key[2] + MORE)
    return Layout(stream, Shape(*key, capacity_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("key", SHAPES, ids=str)
def test_no_plan_that_fits_is_excluded(key: tuple[ScheduleName, int, int, int]) -> None:
    met, closest = 0, math.inf
    for seed in range(6):
        generator, loose = np.random.default_rng(seed), _layout(seed, key)
        plans = [drawn(loose, generator) for _ in range(300)]
        # A third of the plans fit.
        needs = np.array([needed_bytes(loose, plan) for plan in plans])
        layout = _layout(seed, key, float(np.quantile(needs, 1 / 3)))
        most = [np.full(layout.shape.pipeline, run.count) for run in layout.stream.runs]
        rows = Slowest(layout).rows(most)
        assert rows
        for plan, needed in zip(plans, needs, strict=True):
            if needed <= layout.shape.capacity_bytes:
                values = _timed(layout, plan)
                spare = [float(row.values @ values[row.columns]) - row.low for row in rows]
                assert min(spare) >= -1e-9 * values[LENGTH]
                met, closest = met + 1, min(closest, min(spare) / values[LENGTH])
    assert met > 300 and closest < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("key", [SHAPES[0], SHAPES[4]], ids=str)
def test_seconds_are_those_of_the_best_choices(key: tuple[ScheduleName, int, int, int]) -> None:
    """Against every way to lay a rank's blocks and to choose that fits: never more, and nearly always as much (each instant is
    looked at for itself)."""
    told, equal, more = 0, 0, 0
    for seed in range(8):
        loose = _layout(seed, key)
        stream, shape = loose.stream, loose.shape
        some = [needed_bytes(loose, drawn(loose, np.random.default_rng(seed))) for _ in range(20)]
        layout = _layout(seed, key, float(np.median(some)))
        for rank in range(shape.pipeline):
            found = Slowest(layout).seconds(1, rank, 3)
            least = np.full(4, np.inf)
            for number, slowest_s in _every(layout, rank):
                least[number] = min(least[number], slowest_s)
            fits = np.isfinite(least)
            assert (found[fits] <= least[fits] * (1 + 1e-6)).all()
            equal += int((found[fits] >= least[fits] * (1 - 1e-6)).sum())
            more += int(fits.sum())
            told += int((np.diff(least[fits]) > 0).sum())
        assert stream.runs[1].count > 3
    assert told > 10 and equal > 0.9 * more


def _every(layout: Layout, rank: int) -> Iterator[tuple[int, float]]:
    """All numbers of blocks of the long run on a rank's stages, three in all at most, with every choice that fits: how many
    there are, and the seconds of the slowest stage."""
    members, sizes, free = layout.memory_of(rank)
    room = free - layout.least_transients[rank]
    for run in (0, 2):
        mine = layout.pair_run[layout.pair[members]] == run
        if mine.any() and len(set(layout.stage[members[mine]])) == 1 and len(layout.members(run, rank)) == 1:
            whole = [stage for stage, other in zip(layout.pair_stage, layout.pair_run, strict=True) if other == run]
            if len(whole) == 1:
                for kind in (0, 1):
                    room = room - sizes[:, mine & (layout.kind[members] == kind)].min(axis=1)
    pairs = layout.members(1, rank)
    seconds = _seconds(layout)
    for numbers in itertools.product(range(4), repeat=len(pairs)):
        if sum(numbers) > 3:
            continue
        ways = []
        for pair, number in zip(pairs, numbers, strict=True):
            for kind in (0, 1):
                mine = np.flatnonzero((layout.pair[members] == pair) & (layout.kind[members] == kind))
                ways.append([(pair, np.array(way, dtype=int)) for way in itertools.combinations_with_replacement(mine, number)])
        for chosen in itertools.product(*ways):
            held, took = np.zeros(len(room)), dict.fromkeys(pairs.tolist(), 0.0)
            for pair, way in chosen:
                held = held + sizes[:, way].sum(axis=1)
                took[int(pair)] += float(seconds[members[way]].sum())
            if (held <= room).all():
                yield sum(numbers), max(took.values())


def _seconds(layout: Layout) -> Floats:
    """[choices]: of the backward pass that a stage's successor waits for."""
    whole = layout.vectors[:, INPUT_GRADIENT] + (0.0 if layout.passes == 3 else layout.vectors[:, INPUT_GRADIENT + 1])
    return np.asarray(np.where(layout.kind == 0, whole, layout.stream.gathers.floor * layout.vectors[:, INPUT_GRADIENT]))


def test_what_a_rank_does_between_two_passes_of_a_stage() -> None:
    """One round of interleaved 1F1B: between the backward passes of a stage nothing else, but for the last stages' forward
    passes. With three rounds two more turns of every other stage, forward and back."""
    one, three = between(("interleaved-1f1b", 4, 3, 4)), between(("interleaved-1f1b", 4, 3, 12))
    for rank in range(4):
        owned = [rank, rank + 4, rank + 8]
        assert one[rank].own == 3 and not one[rank].shared.any()
        shared: Indices = three[rank].shared[owned]
        assert three[rank].own == 3 and (shared[:, 1:] == 8).all()
        assert (np.delete(three[rank].shared, owned, axis=0) == 0).all()


def test_one_stage_a_rank_needs_no_rows() -> None:
    layout = replace(_layout(0, ("interleaved-1f1b", 2, 2, 4)), shape=Shape("1f1b", 4, 1, 4, streams.CAPACITY))
    assert not Slowest(layout).rows([np.full(4, run.count) for run in layout.stream.runs])
