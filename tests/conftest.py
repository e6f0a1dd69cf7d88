"""The flag that rewrites golden programs, and the processes that all tests of a session share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.matrix.workers import Workers
from tests.rehearse.server import Server

# Pages are as wide as they are made for: pytest-xdist tells its processes how wide the terminal is.
os.environ.pop("COLUMNS", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` writes what is emitted now over the golden programs."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden programs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes is begun first: at the end one process would wait for the other."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What torch's modules and the cases hold is not walked over by every collection of Python's: an eighth of a trace."""
    gc.collect()
    gc.freeze()


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
