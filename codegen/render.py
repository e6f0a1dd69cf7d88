"""Program to text: a file name to its contents. Templates only lay out what is computed here."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from codegen.classes import dictionary, render_chain, render_class, render_made_for, render_stage
from codegen.functions import render_function, wrap
from codegen.naming import escaped
from codegen.program import COMMON, Argument, Machine, Program
from planner.ir.counting import counted
from planner.ir.plan import Mesh, Prediction

_TEMPLATES = Path(__file__).parent / "templates"


def render(program: Program, *, prediction: Prediction | None = None, machine: Machine = COMMON) -> dict[str, str]:
    """Contents of every file that is written from the program, by name."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    values = {**_model_values(program), **_train_values(program, prediction, machine)}
    files = {
        name: _tidy(environment.get_template(f"{name}.j2").render(values))
        for name in ("model.py", "train.py", "README.md", "launch.sh", "launch.sbatch")
    }
    recipes = {
        fqn: {"decay": fqn not in program.undecayed, "steps": [[step.op, *step.arguments] for step in steps]}
        | ({"idle": list(program.idle[fqn])} if fqn in program.idle else {})
        for fqn, steps in program.initialization.items()
    }
    files["initialization.json"] = _table(recipes)
    if program.constants:
        files["constants.json"] = _table({
            item.fqn: {
                "dtype": item.type.dtype, "shape": list(item.type.sizes(1)), "names": list(item.names), "fixed": item.fixed,
                "data": item.data,
            }
            for item in program.constants
        })
    return files


def _table(entries: Mapping[str, object]) -> str:
    """A JSON object, one entry a line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _tidy(text: str) -> str:
    """Two empty lines at most, one newline at the end."""
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"


def _model_values(program: Program) -> dict[str, object]:
    tensor = program.plan.mesh.tensor
    classes = [render_class(cls, tensor) for cls in program.classes]
    context = ["\n".join(render_function(function, method=False)) for function in program.context]
    stage = render_stage(program)
    read = {node.id for node in ast.walk(ast.parse("\n".join([*classes, *context, stage]))) if isinstance(node, ast.Name)}
    return {
        "classes": classes, "context": context, "stage": stage, "chain": render_chain(program),
        "made_for": render_made_for(program),
        "functional": "F" in read, "checkpointed": "checkpoint" in read, "loads_constants": bool(program.constants),
    }


def _summary(program: Program) -> str:
    mesh = program.plan.mesh
    axes = " x ".join(f"{name} {degree}" for name, degree in _degrees(mesh) if degree > 1)
    return counted(mesh.devices, "device") + (f" ({axes})" if axes else "")


def _train_values(program: Program, prediction: Prediction | None, machine: Machine) -> dict[str, object]:
    plan = program.plan
    devices = plan.mesh.devices
    local = min(machine.devices, devices)
    stages = [
        {"first": s.first, "last": s.last, "zero": _repeated([d.zero for d in s.decisions])} for s in plan.stages
    ]
    inputs = [_input(argument) for argument in program.batch]
    sized = any(entry["role"] == "tokens" and entry["shape"] == (plan.sequence,) for entry in inputs)
    flops = prediction.model_flops_per_device_s * devices * prediction.step_s / plan.batch.total if prediction else 0.0
    peak = prediction.model_flops_per_device_s / prediction.mfu if prediction and prediction.mfu else 0.0
    predicted = ""
    if prediction:
        predicted = (
            f"{prediction.step_s:.4g} s a step, {prediction.rate(plan.batch.total)}, MFU {prediction.mfu:.1%}, "
            f"{prediction.peak_memory_bytes / 2**30:.3g} GiB at the peak"
        )
    return {
        "model": escaped(program.model), "fingerprint": plan.model_fingerprint, "summary": _summary(program), "per_node": local,
        "nodes": -(-devices // local), "gpus": not machine.host,
        "job": re.sub(r"\W+", "-", program.model).strip("-") or "train",
        "precision": plan.precision, "sequence": plan.sequence, "degrees": _degrees(plan.mesh),
        "pipeline": plan.mesh.pipeline, "data": plan.mesh.data, "tensor": plan.mesh.tensor, "zero_group": plan.zero_group,
        "total": plan.batch.total, "micro": plan.batch.micro,
        "accumulation": plan.batch.accumulation, "schedule": plan.schedule.name, "virtual": plan.schedule.virtual,
        "stages": stages, "inputs": inputs, "sized": sized, "sample_flops": f"{flops:.6g}", "peak_flops": f"{peak:.6g}",
        "random": program.random, "predicted": predicted, "optimizer": plan.optimizer,
        "untrained": "\n".join(wrap(f"untrained = {dictionary(program.untrained)}", 4)) if program.untrained else "",
    }


def _input(argument: Argument) -> dict[str, object]:
    """What ``INPUTS`` says of a batch input; what is as usual stays empty."""
    given = argument.given
    return {
        "name": given.name, "shape": tuple(given.type.sizes(1)[1:]), "dtype": given.type.dtype, "role": given.role,
        "high": given.high, "shown": given.shown, "like": "" if given.like == ("normal",) else _literal(given.like),
        "argument": "" if argument.variable == given.name else argument.variable,
    }


def _literal(parts: Sequence[str | float]) -> str:
    """A tuple, quoted as all else is."""
    return f"({', '.join(map(json.dumps, parts))}{',' if len(parts) == 1 else ''})"


def _degrees(mesh: Mesh) -> list[tuple[str, int]]:
    """Axes and degrees, slowest to fastest in the order of the ranks."""
    return [(axis, mesh.degrees[axis]) for axis in mesh.order.split("-")]


def _repeated(values: list[int]) -> str:
    """A list as text, equal neighbours counted: ``[3] * 40 + [0]``."""
    groups: list[tuple[int, int]] = []
    for value in values:
        if groups and groups[-1][0] == value:
            groups[-1] = value, groups[-1][1] + 1
        else:
            groups.append((value, 1))
    return " + ".join(f"[{value}]" + (f" * {count}" if count > 1 else "") for value, count in groups)
