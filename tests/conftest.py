"""The flag that rewrites golden programs."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` writes what is emitted now over the golden programs."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden programs")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden programs are to be rewritten."""
    return bool(request.config.getoption("--update-golden", default=False))
