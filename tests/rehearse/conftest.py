"""The one process that all tests of a session rehearse in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rehearse.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()
