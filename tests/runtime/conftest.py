"""One pool of workers for all tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.group import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Worker processes, reused by every case."""
    workers = ProcessPool()
    yield workers
    workers.close()
