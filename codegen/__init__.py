"""Emission: from a plan and its graph to a directory of plain PyTorch that a person can read and torchrun can start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from codegen.lower import lower
from codegen.program import COMMON, Machine
from codegen.render import render
from codegen.verify import verify
from planner.ir.errors import InputError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.ir.replacing import replacing

__all__ = ["Machine", "emit", "lower", "render", "verify"]

_RUNTIME = Path(__file__).parent.parent / "runtime"
_MARKS = ("train.py", "plan.yaml", "runtime")


def emit(
    plan: Plan, graph: ModelGraph, directory: Path, *, prediction: Prediction | None, plan_yaml: str,
    machine: Machine = COMMON, beside: Mapping[str, str] | None = None,
) -> None:
    """Write the program of a plan. ``plan_yaml``: the plan's own text; ``machine``: of the cluster; ``beside``:
    files that belong to the plan, by name.

    An emitted program is overwritten; raises InputError where the directory holds anything else, and OSError.
    """
    program = verify(lower(plan, graph))
    files = render(program, prediction=prediction, machine=machine)
    write(directory, {**files, "plan.yaml": plan_yaml, **(beside or {})})


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files, and the runtime beside them: all, or none where one cannot be written. Others in the directory stay."""
    if directory.exists() and not directory.is_dir():
        raise InputError(str(directory), "is a file", "a directory that is new, empty or an emitted program")
    if directory.exists() and any(directory.iterdir()) and not all((directory / mark).exists() for mark in _MARKS):
        raise InputError(str(directory), "holds files that are no emitted program", "a new or empty directory")
    with replacing() as new:
        if "constants.json" not in files:
            new.remove(directory / "constants.json")
        for name, text in files.items():
            new.write(directory / name, text, mode=0o755 if name == "launch.sh" else None)
        new.copy(directory / "runtime", _RUNTIME)
