"""Layouts: the ranks' boxes tile the whole tensor, and taking a part is the same as copying its boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.ir import placement
from runtime.layout import Layout, split_sizes
from runtime.parameters import cut, overlaps, piece


@given(extent=st.integers(1, 60), degree=st.integers(1, 7), unit=st.integers(1, 4))
def test_split_sizes_are_the_planners(extent: int, degree: int, unit: int) -> None:
    assert split_sizes(extent * unit, degree, unit) == placement.split_sizes(extent * unit, degree, unit)


@given(
    segments=st.lists(st.integers(1, 5), min_size=1, max_size=3), unit=st.integers(1, 3), degree=st.integers(1, 5),
    dim=st.integers(0, 2), data=st.integers(1, 4),
)
def test_boxes_cut_by_rows_tile_the_whole(
    segments: list[int], unit: int, degree: int, dim: int, data: int
) -> None:
    sizes = tuple(segment * unit for segment in segments)
    shape = tuple(sum(sizes) if index == dim else 4 for index in range(3))
    full = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float64).reshape(shape)
    rebuilt, hits = torch.zeros_like(full), torch.zeros_like(full)
    for rank in range(degree):
        layout = Layout(shape, degree, dim, sizes if len(sizes) > 1 else (), unit)
        local = layout.take(full, rank)
        assert tuple(local.shape) == layout.local_shape(rank)
        each = -(-local.shape[0] // data)
        for shard in range(data):
            first = min(shard * each, local.shape[0])
            rows = min(each, local.shape[0] - first)
            for box in layout.boxes(rank):
                if not overlaps(box, first, rows):
                    continue
                offsets, extents, _ = narrowed = cut(box, first, rows)
                piece(rebuilt, (extents, extents, offsets)).copy_(piece(local[first : first + rows], narrowed))
                piece(hits, (extents, extents, offsets)).add_(1)
    assert torch.equal(rebuilt, full)
    assert torch.equal(hits, torch.ones_like(hits))


def test_a_unit_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 4"):
        split_sizes(6, 2, 4)
