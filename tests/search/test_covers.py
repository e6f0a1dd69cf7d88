"""No whole choice that fits in a rank's memory is excluded by covers, and parts of choices are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from planner.ir.plan import Mesh
from planner.search.allowed import Allowed
from planner.search.chain import Chain
from planner.search.covers import cover_rows
from planner.search.engine import planning_engine
from planner.search.linear import Floats, Indices
from planner.search.rows import Layout
from planner.search.shape import Shape
from planner.search.stream import stream_of
from tests.search.made import make_cluster, make_costed, make_graph


def _dealt(layout: Layout, members: Indices) -> Iterator[Floats]:
    """All whole choices of a rank's blocks, as values of ``members``."""
    keys = 2 * layout.pair[members] + layout.kind[members]
    parts = []
    for key in np.unique(keys):
        mine = np.flatnonzero(keys == key)
        count = round(float(layout.fewest[layout.pair[members[mine[0]]]]))
        ways = itertools.combinations_with_replacement(mine, count)
        parts.append([np.bincount(way, minlength=len(members)) for way in ways])
    for each in itertools.product(*parts):
        yield np.sum(each, axis=0).astype(float)


@pytest.mark.slow
def test_no_choice_that_fits_is_excluded() -> None:
    said, sloped, attained = 0, 0, 0

    @seed(8128)
    @settings(max_examples=240, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        pipeline=st.sampled_from([2, 3]), virtual=st.sampled_from([1, 2]), ends=st.booleans(), number=st.integers(0, 10_000),
        room=st.integers(400, 900), zeros=st.sampled_from([(0,), (1, 2), (0, 3), (1, 2, 3)]), blocks=st.integers(6, 8),
        levels=st.sampled_from([("none", "full"), ("none", "selective", "full")]),
    )
    def each(
        pipeline: int, virtual: int, ends: bool, number: int, room: int, zeros: tuple[int, ...], blocks: int,
        levels: tuple[str, ...],
    ) -> None:
        nonlocal said, sloped, attained
        names = "e" * ends + "b" * blocks + "h" * ends
        costed = make_costed(make_graph(list(names)), number, zeros=zeros, levels=levels)
        mesh, cluster = Mesh(pipeline=pipeline, data=2), make_cluster(2 * pipeline, room)
        stream = stream_of((Chain((costed,), 0, Allowed(levels, zeros, ()), (2,)),), mesh, cluster, planning_engine())
        assert stream is not None
        shape = Shape("1f1b" if virtual == 1 else "interleaved-1f1b", pipeline, virtual, 2 * pipeline, 0)
        # What is there beside the blocks takes the rest.
        beside = [Layout(stream, shape, exact=True).memory_of(rank)[2].min() for rank in range(pipeline)]
        layout = Layout(stream, replace(shape, capacity_bytes=room - max(beside)), exact=True)
        cuts = np.linspace(0, len(names), shape.stages + 1).astype(int)
        laid = np.zeros(len(layout.n_at))
        run_of = np.repeat(np.arange(len(stream.runs)), [run.count for run in stream.runs])
        for stage, (first, last) in enumerate(itertools.pairwise(cuts)):
            for run in run_of[first:last]:
                laid[(layout.pair_stage == stage) & (layout.pair_run == run)] += 1
        assert laid.sum() == len(names)
        layout.fewest = layout.most = laid
        rows = cover_rows(layout)
        said += len(rows)
        sloped += sum(bool((row.values < 0).any()) for row in rows)
        for rank in range(pipeline):
            members, sizes, free = layout.memory_of(rank)
            place = {int(at): here for here, at in enumerate(layout.choice_at[members])}
            mine = [row for row in rows if int(row.columns[0]) in place]
            met = np.zeros(len(mine), dtype=bool)
            for values in _dealt(layout, members):
                if (sizes @ values + layout.least_transients[rank] <= free).all():
                    kept = [float(row.values @ values[[place[int(at)] for at in row.columns]]) for row in mine]
                    assert all(amount <= row.high + 1e-9 for amount, row in zip(kept, mine, strict=True))
                    met |= np.array([amount == row.high for amount, row in zip(kept, mine, strict=True)], dtype=bool)
            attained += int(met.sum())

    each()
    assert said > 100 and sloped > 20
    assert attained > said / 2, "covers that no choice comes up to are too wide"
