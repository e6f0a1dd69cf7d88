"""How a program says that it is started, and what its launch scripts start."""

from __future__ import annotations

import ast
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import Machine, lower, render
from tests.codegen.plans import plan_of, traced


def written(machine: Machine, directory: Path) -> dict[str, str]:
    """The files of a program of four devices, and a ``torchrun`` beside them that prints what it is given."""
    graph = traced("gpt")
    files = render(lower(plan_of(graph, data=4), graph), machine=machine)
    (directory / "launch.sh").write_text(files["launch.sh"])
    (directory / "torchrun").write_text('#!/bin/sh\necho "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"\n')
    (directory / "torchrun").chmod(0o755)
    return files


def launched(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    inherited = {name: value for name, value in os.environ.items() if name not in told}
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(directory / "launch.sh"), "--steps", "3"], capture_output=True, text=True, check=False, timeout=600,
        env={**inherited, **environment, "PATH": path},
    )


@pytest.mark.slow
def test_runs_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    """Each has an endpoint of its own; workers that are started again meet in another store, for gloo's sake."""
    files = written(Machine(4), tmp_path)
    done = launched(tmp_path, MASTER_PORT="29500")
    assert done.stdout == f"1 --standalone --nproc-per-node 4 {tmp_path}/train.py --steps 3\n"
    for file in ("README.md", "train.py"):
        assert "    torchrun --nproc-per-node 4 train.py --steps 100" in files[file]


@pytest.mark.slow
def test_what_several_nodes_are_told_to_run_is_run_on_each_of_them(tmp_path: Path) -> None:
    files = written(Machine(2), tmp_path)
    for file in ("README.md", "train.py"):
        assert "    MASTER_ADDR=FIRST_NODE ./launch.sh --steps 100" in files[file]
        assert "on each of 2 nodes of 2 devices" in files[file]
        assert "torchrun --nproc-per-node" not in files[file], "one node alone is half of the plan"
    alone = launched(tmp_path)
    assert alone.returncode and not alone.stdout and "MASTER_ADDR: set it to the name" in alone.stderr
    done = launched(tmp_path, MASTER_ADDR="one")
    start = "1 --nnodes 2 --nproc-per-node 2 --rdzv-id"
    assert done.stdout == f"{start} gpt --rdzv-backend c10d --rdzv-endpoint one:29500 {tmp_path}/train.py --steps 3\n"
    done = launched(tmp_path, MASTER_ADDR="one", MASTER_PORT="3000", SLURM_JOB_ID="17")
    assert f"{start} 17 --rdzv-backend c10d --rdzv-endpoint one:3000 " in done.stdout


@pytest.mark.slow
def test_a_models_name_may_hold_anything() -> None:
    """An ``hf:`` model is called as its folder is."""
    graph = traced("gpt")
    files = render(replace(lower(plan_of(graph, data=4), graph), model='a"""b\\N\nc'))
    for file in ("model.py", "train.py"):
        assert 'a"""b\\N\nc' in str(ast.get_docstring(ast.parse(files[file]), clean=False))


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
def test_a_program_knows_whether_it_was_planned_for_accelerators(host: bool, tmp_path: Path) -> None:
    assert f"device=device, accelerators={not host}, told" in written(Machine(4, host), tmp_path)["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
def test_slurm_is_asked_for_accelerators_where_there_are_any(host: bool, tmp_path: Path) -> None:
    assert ("#SBATCH --gpus-per-node=2\n" in written(Machine(2, host), tmp_path)["launch.sbatch"]) is not host
