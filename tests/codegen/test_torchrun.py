"""Every plan of a model prints the same losses, and torchrun starts a program as a user does.

Most programs run in the session's workers, which are there already; what torchrun starts is compared with them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codegen import emit
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan
from tests.codegen.megatron import placements
from tests.codegen.plans import plan_of, traced
from tests.matrix.workers import Workers
from tests.torchrun import torchrun
from tests.wide import wide

PLANS = {
    "one rank": {},
    "recomputed": {"recompute": ("full", "selective", "none")},
    "pipeline 2, tied across stages": {"pipeline": 2, "cuts": (2,), "recompute": ("selective",)},
    "data 2, ZeRO 3": {"data": 2, "zero": 3},
    "interleaved": {"pipeline": 2, "cuts": (1, 2, 3), "schedule": "interleaved-1f1b", "virtual": 2},
}
STARTED = {("gpt", "one rank"), ("llama", "data 2, ZeRO 3"), ("llama", "interleaved")}
"""What torchrun starts."""
STEPS = ("--steps", "2")

pytestmark = pytest.mark.slow


def written(plan: Plan, graph: ModelGraph, directory: Path) -> Path:
    """The plan's program."""
    emit(plan, graph, directory, prediction=None, plan_yaml="")
    return directory


def worked(workers: Workers, plan: Plan, directory: Path) -> list[str]:
    """What a program prints as losses."""
    outcomes = workers.run(directory, plan.mesh.devices, STEPS)
    failed = [outcome for outcome in outcomes if outcome.code]
    assert not failed, failed[0].error
    return re.findall(r"loss (\S+)", outcomes[0].output)


def started(plan: Plan, directory: Path) -> list[str]:
    """The same of processes of its own, under torchrun with its output piped."""
    done = torchrun(plan.mesh.devices, str(directory / "train.py"), *STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"loss (\S+)", done.stdout)


@pytest.mark.parametrize("example", ["gpt", wide("llama")])
def test_every_plan_prints_the_same_losses(workers: Workers, example: str, tmp_path: Path) -> None:
    graph = traced(example)
    found = {}
    for at, (name, settings) in enumerate(PLANS.items()):
        plan = plan_of(graph, total=8, **settings)
        directory = written(plan, graph, tmp_path / str(at))
        found[name] = worked(workers, plan, directory)
        if (example, name) in STARTED:
            found[f"{name}, by torchrun"] = started(plan, directory)
    assert all(printed == found["one rank"] and len(printed) == 2 for printed in found.values()), found


@pytest.mark.parametrize("sequence_parallel", [wide(False), True])
def test_tensor_parallel_programs_print_the_same_losses(workers: Workers, sequence_parallel: bool, tmp_path: Path) -> None:
    graph = traced("gpt")
    split = placements(graph, sequence_parallel)
    plans = {
        "one": plan_of(graph, total=8),
        "tensor": plan_of(graph, total=8, tensor=2, placements=split, recompute=("selective",)),
        "both": plan_of(graph, total=8, tensor=2, pipeline=2, cuts=(2,), placements=split),
    }
    found = {name: worked(workers, plan, written(plan, graph, tmp_path / name)) for name, plan in plans.items()}
    if sequence_parallel:
        found["both, by torchrun"] = started(plans["both"], tmp_path / "both")
    assert all(printed == found["one"] for printed in found.values()), found


def test_dropout_does_not_depend_on_the_pipeline_or_recomputation(workers: Workers, tmp_path: Path) -> None:
    graph = traced("gpt", dropout=0.1)
    found = []
    for at, settings in enumerate([{}, {"recompute": ("full", "selective")}, {"pipeline": 2, "cuts": (2,)}]):
        plan = plan_of(graph, total=8, **settings)
        found.append(worked(workers, plan, written(plan, graph, tmp_path / str(at))))
    assert found[0] == found[1] == found[2]
