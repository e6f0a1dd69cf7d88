"""What torch's caching allocator reserves: its rules, one by one, and what a program's streams make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codegen import emit
from planner.evaluate.replay import replay
from planner.trace import load_model, trace_model
from runtime.rehearsal_allocator import MIB, CachingAllocator, Event, Reserved, reserved
from runtime.rehearsal_memory import StorageLog
from tests.matrix.build import Row, make_plan
from tests.rehearse.server import Server

ROOT = Path(__file__).resolve().parent.parent.parent


def reserved_bytes(events: list[Event]) -> int:
    """What is reserved when these have happened, one after the other."""
    return reserved(events, ()).size_bytes


@pytest.mark.parametrize(("size", "segment"), [
    (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
    (11 * MIB + 1, 12 * MIB),
])
def test_segments_are_of_three_kinds(size: int, segment: int) -> None:
    assert reserved_bytes([(0, size, 0)]) == segment


def test_a_segment_serves_many() -> None:
    assert reserved_bytes([(at, 5 * MIB, 0) for at in range(4)]) == 20 * MIB
    assert reserved_bytes([(at, 5 * MIB, 0) for at in range(5)]) == 40 * MIB
    assert reserved_bytes([(at, 100, 0) for at in range(4096)]) == 2 * MIB
    assert reserved_bytes([(at, 100, 0) for at in range(4097)]) == 4 * MIB


def test_what_is_free_again_serves_its_own_stream() -> None:
    used_and_freed = [(0, 64 * MIB, 0), (0, 0, 0)]
    assert reserved_bytes([*used_and_freed, (1, 64 * MIB, 0)]) == 64 * MIB
    assert reserved_bytes([*used_and_freed, (1, 64 * MIB, 1)]) == 128 * MIB
    assert reserved_bytes([(0, 64 * MIB, 0), (0, 32 * MIB, 0)]) == 64 * MIB  # A storage that is resized.


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.take(64 * MIB, 0), allocator.take(32 * MIB, 0)
    allocator.give(large)
    allocator.give(small)
    assert allocator.take(30 * MIB, 0) is small and small.size == 30 * MIB
    assert allocator.take(40 * MIB, 0) is large and allocator.reserved_bytes == 96 * MIB


def test_a_rest_that_is_small_is_not_cut_off() -> None:
    allocator = CachingAllocator()
    block = allocator.take(64 * MIB, 0)
    allocator.give(block)
    assert allocator.take(63 * MIB, 0).size == 64 * MIB
    tiny = allocator.take(512, 0)
    assert tiny.size == 512 and tiny.after is not None and tiny.after.size == 2 * MIB - 512


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(60 * MIB, 0))
    parts = [allocator.take(20 * MIB, 0) for _ in range(3)]
    for at in order:
        allocator.give(parts[at])
    assert allocator.take(60 * MIB, 0).size == 60 * MIB and allocator.reserved_bytes == 60 * MIB


def test_what_nothing_lies_in_is_given_back_where_there_is_no_room() -> None:
    allocator = CachingAllocator(110 * MIB)
    held, free = allocator.take(30 * MIB, 0), allocator.take(50 * MIB, 0)
    allocator.give(free)
    assert (allocator.take(20 * MIB, 1).size, allocator.reserved_bytes, allocator.flushes) == (20 * MIB, 100 * MIB, 0)
    assert (allocator.take(60 * MIB, 0).size, allocator.reserved_bytes, allocator.flushes) == (60 * MIB, 110 * MIB, 1)
    assert not held.free


def test_a_device_that_is_nearly_full_gives_back_in_every_step() -> None:
    """Two streams take turns at memory that there is once."""
    step = [(0, 64 * MIB, 0), (0, 0, 0), (1, 64 * MIB, 1), (1, 0, 1)]
    assert reserved([], step, 200 * MIB, steps=3) == Reserved(128 * MIB, 0)
    assert reserved([], step, 100 * MIB, steps=3) == Reserved(64 * MIB, 2)
    assert reserved([(2, 30 * MIB, 0)], step, 160 * MIB, steps=3) == Reserved(158 * MIB, 0)


def test_what_a_step_leaves_is_let_go_of_in_the_next() -> None:
    assert reserved([], [(0, 64 * MIB, 0)], steps=3) == Reserved(128 * MIB, 0)


def test_shorter_steps_before_leave_no_pieces() -> None:
    log = StorageLog()
    parameter = torch.empty(32 * MIB, dtype=torch.uint8)
    log.see(parameter)
    for size in (48 * MIB, 64 * MIB):
        log.begin()
        value = torch.empty(size, dtype=torch.uint8)
        log.see(value)
        del value
    assert log.reserved() == Reserved(96 * MIB, 0)


@pytest.mark.slow
@pytest.mark.parametrize("row", [
    Row(accumulation=2), Row(data=4, zero=3, accumulation=2, recompute="full"), Row(pipeline=2, data=2, zero=1, accumulation=4),
], ids=lambda row: str(row.label))
def test_what_is_predicted_is_near_what_is_reserved(server: Server, row: Row, tmp_path: Path) -> None:
    """The same of each stream. What is reserved has pieces between besides, more of it in a small model."""
    source = load_model(f"{ROOT / 'examples' / 'llama.py'}:llama", {
        "layers": 4, "hidden": 1024, "heads": 8, "ffn_hidden": 4096, "vocab": 32000,
    }, None)  # fmt: skip
    graph = trace_model(source, sequence=1024, dtype="bfloat16")
    plan = make_plan(graph, row, precision="bf16")
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="format: 1\n")
    each = row.devices // row.pipeline
    rehearsed = server.rehearse(tmp_path / "program", [rank * each for rank in range(row.pipeline)], kernels="cuda")
    for rank, measured in enumerate(rehearsed):
        seen = replay(plan, graph.on_accelerator, rank)
        assert seen.total + seen.cached_bytes == measured.streams_bytes
        assert (seen.cached_bytes > 0) == (row.data > 1)  # A rank alone has one stream.
        assert measured.reserved_bytes is not None
        assert 1.0 <= measured.reserved_bytes / measured.streams_bytes < 1.25
