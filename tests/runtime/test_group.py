"""The worker group names the rank that ended, not those that waited for it, and forgives one crash."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime.group import ProcessPool, WorkerError


def _end_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def _crash(marks: Path, times: int) -> int:
    """Ends rank 1 by a signal, so many times."""
    if dist.get_rank() == 1 and len(list(marks.iterdir())) < times:
        (marks / str(len(list(marks.iterdir())))).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.ones(1))
    return dist.get_rank()


def _make_groups() -> int:
    """The threads of this process once it has a group more than the world's."""
    for _ in range(4):
        dist.new_group([0, 1])
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="nothing tells a process's threads here")
def test_groups_and_their_threads_end_with_a_case() -> None:
    pool = ProcessPool()
    try:
        first = pool.run(2, _make_groups)
        for _ in range(3):
            last = pool.run(2, _make_groups)
        assert last == first
    finally:
        pool.close()


@pytest.mark.slow
def test_a_crash_is_forgiven_once(tmp_path: Path) -> None:
    pool, once, always = ProcessPool(), tmp_path / "once", tmp_path / "always"
    once.mkdir()
    always.mkdir()
    try:
        with pytest.warns(UserWarning, match="run again: rank 1 of 2: ended with exit code -11"):
            assert pool.run(2, _crash, once, 1) == [0, 1]
        with pytest.warns(UserWarning, match="run again"), pytest.raises(WorkerError, match="exit code -11"):
            pool.run(2, _crash, always, 2)
    finally:
        pool.close()


def test_the_rank_that_ended_is_named_first() -> None:
    pool = ProcessPool()
    try:
        with pytest.raises(WorkerError, match=r"^rank 1 of 2: ended with exit code 3\nrank 0 of 2: Traceback"):
            pool.run(2, _end_on_rank_1)
        assert pool.run(2, dist.get_rank) == [0, 1], "the next case gets a group of its own"
    finally:
        pool.close()
