"""Plans that the tests of all commands share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import SMALL, Outcome, run, small

pytest.register_assert_rewrite("tests.cli.contract")


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A plan over a pipeline, the data axis and recomputation."""
    path = tmp_path_factory.mktemp("planned") / "plan.yaml"
    outcome = run("plan", *SMALL, "--cluster", "local-cpu:1x4", "--batch", 16, "--pin", "pipeline=2", "--pin",
                  "schedule=1f1b", "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A plan whose tensors are split, sequence-parallel, in bf16."""
    path = tmp_path_factory.mktemp("split") / "plan.yaml"
    outcome = run("plan", *small(hidden=1024), "--seq", 256, "--cluster", "dgx-h100:1", "--batch", 8, "--pin",
                  "tensor=4", "--pin", "sequence_parallel=true", "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.fixture
def copied(planned: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """The three files of a plan, for a test to spoil."""
    for file in planned[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "plan.yaml"
