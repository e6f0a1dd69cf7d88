"""Where a plan's files lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.bundle import alternative_path, check_outputs, cluster_path, graph_path
from planner.ir.errors import PlanFileError


@pytest.mark.parametrize(
    ("plan", "graph", "cluster", "second"),
    [
        ("plan.yaml", "plan.graph.json", "plan.cluster.yaml", "plan.2.yaml"),
        ("a.b/gpt.v1.yml", "a.b/gpt.v1.graph.json", "a.b/gpt.v1.cluster.yaml", "a.b/gpt.v1.2.yml"),
        ("plan", "plan.graph.json", "plan.cluster.yaml", "plan.2"),
        ("plan.v1", "plan.v1.graph.json", "plan.v1.cluster.yaml", "plan.v1.2"),
        (".v1", ".v1.graph.json", ".v1.cluster.yaml", ".v1.2"),
    ],
)
def test_only_yamls_suffix_is_replaced(plan: str, graph: str, cluster: str, second: str) -> None:
    """Plans whose names differ after another dot do not share their files."""
    path = Path(plan)
    assert (graph_path(path), cluster_path(path), alternative_path(path, 2)) == (Path(graph), Path(cluster), Path(second))


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refused)
    with pytest.raises(PlanFileError, match="cannot be read \\(Permission denied\\)"):
        check_outputs(tmp_path / "plan.yaml", 1, ())
