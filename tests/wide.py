"""Cases that ask more of the same as others do: `make test-wide` runs them, `make test` does not have the time."""

from __future__ import annotations

from typing import Any

import pytest


def wide(*values: Any) -> Any:
    """A case of a parametrized test, of these values."""
    return pytest.param(*values, marks=pytest.mark.wide)
