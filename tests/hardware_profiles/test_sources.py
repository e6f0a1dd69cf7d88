"""Every number of every packaged file has a unit, a kind and a source that somebody read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hardware_profiles

FOLDER = Path(hardware_profiles.__file__).parent
FILES = sorted(FOLDER.glob("*/*.yaml"))
COUNTS = ("size", "devices_per_node", "host_devices", "nodes")
"""How many there are: no quantities."""


def _bare(content: Any, path: str = "") -> Iterator[str]:
    """Paths of numbers that are no quantity."""
    if isinstance(content, dict) and "value" in content:
        if set(content) != {"value", "unit", "kind", "source"}:
            yield path
        return
    for name, inner in content.items() if isinstance(content, dict) else ():
        if isinstance(inner, int | float) and not isinstance(inner, bool) and name not in COUNTS:
            yield f"{path}.{name}"
        yield from _bare(inner, f"{path}.{name}")


def _quantities(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict):
        if "value" in content:
            yield content
        for inner in content.values():
            yield from _quantities(inner)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_number_is_bare_and_none_is_from_memory(path: Path) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(_bare(content)) == []
    for item in _quantities(content):
        assert item["kind"] in ("datasheet", "measured", "fitted")
        assert len(item["source"]) >= 3 and "recalled" not in item["source"]
        if item["kind"] == "datasheet":
            assert "estimate" not in item["source"]


def test_there_are_files_of_every_kind() -> None:
    assert {path.parent.name for path in FILES} == {"chips", "engines", "profiles"}


def test_a_bare_number_would_be_found() -> None:
    wrong = {"launch": 3.0, "links": {"node": {"size": 8, "latency": {"value": 1, "unit": "us", "kind": "datasheet"}}}}
    assert list(_bare(wrong)) == [".launch", ".links.node.latency"]
