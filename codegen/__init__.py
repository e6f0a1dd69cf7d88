"""Emission: from a plan and its graph to a directory of plain PyTorch that a person can read and torchrun can start."""

from __future__ import annotations

import shutil
from pathlib import Path

from codegen.lower import lower
from codegen.render import render
from codegen.verify import verify
from planner.ir.errors import InputError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction

__all__ = ["emit", "lower", "render", "verify"]

_RUNTIME = Path(__file__).parent.parent / "runtime"
_MARKS = ("train.py", "plan.yaml", "runtime")


def emit(
    plan: Plan, graph: ModelGraph, directory: Path, *, prediction: Prediction | None, plan_yaml: str,
    per_node: int | None = None,
) -> None:
    """Write the program of a plan. ``plan_yaml``: the plan's own text; ``per_node``: devices of one node (default: 8 at
    most).

    An emitted program is overwritten; raises InputError where the directory holds anything else.
    """
    program = verify(lower(plan, graph))
    files = render(program, prediction=prediction, per_node=per_node)
    write(directory, {**files, "plan.yaml": plan_yaml})


def write(directory: Path, files: dict[str, str]) -> None:
    """Write the files, and the runtime beside them."""
    if directory.exists() and not directory.is_dir():
        raise InputError(str(directory), "is a file", "a directory that is new, empty or an emitted program")
    if directory.exists() and any(directory.iterdir()) and not all((directory / mark).exists() for mark in _MARKS):
        raise InputError(str(directory), "holds files that are no emitted program", "a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("constants.json", "initialization.json"):
        (directory / name).unlink(missing_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "launch.sh").chmod(0o755)
    target = directory / "runtime"
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(_RUNTIME, target, ignore=shutil.ignore_patterns("__pycache__"))
