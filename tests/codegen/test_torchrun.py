"""Emitted programs started as a user starts them: every plan of a model prints the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import emit
from tests.codegen.megatron import placements
from tests.codegen.plans import plan_of, traced

PLANS = {
    "one rank": (1, {}),
    "recomputed": (1, {"recompute": ("full", "selective", "none")}),
    "pipeline 2, tied across stages": (2, {"pipeline": 2, "cuts": (2,), "recompute": ("selective",)}),
    "data 2, ZeRO 3": (2, {"data": 2, "zero": 3}),
    "interleaved": (2, {"pipeline": 2, "cuts": (1, 2, 3), "schedule": "interleaved-1f1b", "virtual": 2}),
}


def losses(directory: Path, ranks: int, steps: int = 2) -> list[str]:
    """What the program prints as losses."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(directory / "train.py"), "--steps", str(steps),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"loss (\S+)", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gpt", "llama"])
def test_every_plan_prints_the_same_losses(example: str, tmp_path: Path) -> None:
    graph = traced(example)
    found = {}
    for at, (name, (ranks, settings)) in enumerate(PLANS.items()):
        emit(plan_of(graph, total=8, **settings), graph, tmp_path / str(at), prediction=None, plan_yaml="")
        found[name] = losses(tmp_path / str(at), ranks)
    assert all(printed == found["one rank"] and len(printed) == 2 for printed in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_programs_print_the_same_losses(sequence_parallel: bool, tmp_path: Path) -> None:
    graph = traced("gpt")
    split = placements(graph, sequence_parallel)
    plans = {
        "one": (1, plan_of(graph, total=8)),
        "tensor": (2, plan_of(graph, total=8, tensor=2, placements=split, recompute=("selective",))),
        "both": (4, plan_of(graph, total=8, tensor=2, pipeline=2, cuts=(2,), placements=split)),
    }
    found = {}
    for name, (ranks, plan) in plans.items():
        emit(plan, graph, tmp_path / name, prediction=None, plan_yaml="")
        found[name] = losses(tmp_path / name, ranks)
    assert found["tensor"] == found["one"] == found["both"], found


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_pipeline_or_recomputation(tmp_path: Path) -> None:
    graph = traced("gpt", dropout=0.1)
    found = []
    for at, (ranks, settings) in enumerate(
        [(1, {}), (1, {"recompute": ("full", "selective")}), (2, {"pipeline": 2, "cuts": (2,)})]
    ):
        emit(plan_of(graph, total=8, **settings), graph, tmp_path / str(at), prediction=None, plan_yaml="")
        found.append(losses(tmp_path / str(at), ranks))
    assert found[0] == found[1] == found[2]
