"""The flag that rewrites golden programs, and the processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.workers import Workers
from tests.rehearse.server import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` writes what is emitted now over the golden programs."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden programs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two processes share the tests, a file stays whole, and one of them has all tests of many processes: two groups of
    eight ranks on two cores wait for each other."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            many = {"workers", "pool"}.intersection(getattr(item, "fixturenames", ()))
            item.add_marker(pytest.mark.xdist_group("many processes" if many else str(item.path)))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden programs are to be rewritten."""
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Eight processes that run emitted programs, each started when a program first needs it."""
    group = Workers(8)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The one process that rehearses emitted programs."""
    running = Server()
    yield running
    running.stop()
