"""Emitted text is what it was; a change is looked at, then written with ``--update-golden``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from codegen import emit, lower, render, verify
from planner.ir.errors import InputError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan
from tests.codegen.megatron import placements
from tests.codegen.plans import ROOT, plan_of, traced

GOLDEN = ROOT / "tests" / "golden"
FILES = ("model.py", "train.py", "README.md", "launch.sh", "launch.sbatch", "initialization.json")
CASES = {
    "gpt-2x2x2": ("gpt", {
        "pipeline": 2, "data": 2, "tensor": 2, "zero": 1, "cuts": (2,), "recompute": ("none", "selective"), "total": 8,
        "precision": "bf16",
    }),
    "llama-1x1x1": ("llama", {"recompute": ("full",)}),
}


def golden(example: str, settings: dict[str, object]) -> tuple[ModelGraph, Plan]:
    """The graph and the plan of a case; over a tensor axis the split is Megatron-LM's, sequence parallel."""
    graph = traced(example, dtype="bfloat16" if settings.get("precision") == "bf16" else "float32")
    split = placements(graph, sequence_parallel=True) if "tensor" in settings else None
    return graph, plan_of(graph, placements=split, **settings)


@pytest.mark.parametrize("name", CASES)
def test_the_emitted_text_is_the_golden_one(name: str, update_golden: bool) -> None:
    example, settings = CASES[name]
    graph, plan = golden(example, settings)
    files = render(verify(lower(plan, graph)))
    for file in FILES:
        path = GOLDEN / name / file
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[file])
        assert files[file] == path.read_text(), f"{path} differs; look, then run with --update-golden"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_emitted_text_is_clean(name: str, tmp_path: Path) -> None:
    example, settings = CASES[name]
    graph, plan = golden(example, settings)
    emit(plan, graph, tmp_path, prediction=None, plan_yaml="")
    for file in ("model.py", "train.py"):
        text = (tmp_path / file).read_text()
        compile(text, file, "exec")
        assert max(map(len, text.splitlines())) <= 120
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120",
         str(tmp_path / "model.py"), str(tmp_path / "train.py")],
        capture_output=True, text=True, cwd=tmp_path,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    graph = traced("gpt")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="no emitted program"):
        emit(plan_of(graph), graph, tmp_path, prediction=None, plan_yaml="")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_emitted_program_is_overwritten(tmp_path: Path) -> None:
    graph = traced("gpt")
    for text in ("first: 1\n", "second: 2\n"):
        emit(plan_of(graph), graph, tmp_path / "program", prediction=None, plan_yaml=text)
    assert (tmp_path / "program" / "plan.yaml").read_text() == "second: 2\n"
    assert (tmp_path / "program" / "runtime" / "block.py").exists()
