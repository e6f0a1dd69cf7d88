"""One pool of workers for all tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.runtime.group import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Worker processes, reused by every case."""
    workers = ProcessPool()
    yield workers
    workers.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A program joins a group of one process, which ends with the test."""
    yield
    dist.destroy_process_group()
