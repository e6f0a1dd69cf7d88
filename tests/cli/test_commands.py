"""`emit`, `hardware`, help, and the command as a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.contract import check_contract
from tests.commands import EXAMPLES, SMALL, Outcome, run


def test_emit_writes_a_program(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    outcome = run("emit", planned[0], "-o", tmp_path / "program")
    assert outcome.code == 0 and "torchrun --nproc-per-node 4" in outcome.err
    assert (tmp_path / "program" / "plan.yaml").read_text() == planned[0].read_text()
    assert run("emit", planned[0], "-o", tmp_path / "program").code == 0


def test_a_programs_readme_names_its_files(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    """And no other."""
    assert run("emit", planned[0], "-o", tmp_path / "program").code == 0
    listed = re.findall(r"`([^`]+)`", (tmp_path / "program" / "README.md").read_text().partition("|---|")[2])
    there = [file.name + ("/" if file.is_dir() else "") for file in (tmp_path / "program").iterdir()]
    assert set(listed) | {"README.md"} == set(there)


def test_a_programs_flops_follow_its_batch(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    """BATCH may be edited, and MFU stays true."""
    assert run("emit", planned[0], "-o", tmp_path / "program").code == 0
    report, text = planned[1].json, (tmp_path / "program" / "train.py").read_text()
    said = re.search(r"flops=(\S+) \* BATCH,", text)
    assert said is not None
    whole = report["predicted"]["model_flops_per_device_s"] * report["cluster"]["devices"] * report["predicted"]["step_s"]
    assert float(said[1]) * report["batch"]["global"] == pytest.approx(whole, rel=1e-5)
    assert "sequence=SEQUENCE, inputs=INPUTS" in text


def test_what_emit_says_to_run_can_be_pasted(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    outcome = run("emit", planned[0], "-o", tmp_path / "a program")
    assert f"run: torchrun --nproc-per-node 4 '{tmp_path / 'a program' / 'train.py'}'\n" in outcome.err


@pytest.mark.slow
def test_emit_warns_of_chips_that_run_no_programs_of_torch(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, "--cluster", "tpu-v4:1", "--batch", 8, "-o", plan).code == 0
    outcome = run("emit", plan, "-o", tmp_path / "program")
    assert outcome.code == 0
    assert f"warning: {plan}: torch's programs do not run on TPUv4; plan for GPUs or CPU cores to run one\n" in outcome.err
    assert "warning" not in run("emit", planned[0], "-o", tmp_path / "other").err


@pytest.mark.slow
def test_a_program_is_started_on_hosts(tmp_path: Path) -> None:
    """Two of a GB200 rack's trays hold eight of the devices that NVLink joins: a node of the cluster, not of a launcher."""
    plan, program = tmp_path / "plan.yaml", tmp_path / "program"
    pins = ("--pin", "data=8", "--pin", "zero=0")
    planned = run("plan", *SMALL, "--cluster", "gb200-nvl72:1x8", "--batch", 8, *pins, "-o", plan)
    assert planned.code == 0, planned.err
    outcome = run("emit", plan, "-o", program)
    assert outcome.code == 0 and outcome.err.endswith("launch.sh on each of 2 nodes of 4 devices\n"), outcome.err
    assert "--nnodes 2 --nproc-per-node 4 " in (program / "launch.sh").read_text()
    slurm = (program / "launch.sbatch").read_text()
    assert "--nodes=2\n" in slurm and "--gpus-per-node=4\n" in slurm
    for file in ("README.md", "train.py"):
        assert "on each of 2 nodes of 4 devices" in (program / file).read_text()


def test_a_programs_own_plan_is_emitted_again(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    program = tmp_path / "program"
    assert run("emit", planned[0], "-o", program).code == 0
    before = {file: file.read_bytes() for file in program.rglob("*") if file.is_file()}
    again = run("emit", program / "plan.yaml", "-o", program)
    assert again.code == 0, again.err
    assert {file: file.read_bytes() for file in program.rglob("*") if file.is_file()} == before


def test_a_foreign_directory_is_left_alone(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "holds files that are no emitted program" in run("emit", planned[0], "-o", tmp_path).error
    assert "cannot be written" in run("emit", planned[0], "-o", tmp_path / "thesis.txt" / "program").error
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_hardware(tmp_path: Path) -> None:
    names = run("hardware").out.split()
    assert "local-cpu" in names and run("hardware", "--json").json == {"profiles": names}
    assert "chip.memory_bandwidth" in run("hardware", "dgx-h100").out
    assert "error: PROFILE: unknown profile 'dgx'; use one of aws-p3" in run("hardware", "dgx").error
    fields = run("hardware", "dgx-h100", "--json").json["fields"]
    assert all(set(field) == {"field", "value", "unit", "kind", "source"} for field in fields)


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    outcome = run("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"shardwright {project['version']}\n", "")


@pytest.mark.parametrize(("columns", "width"), [("90", 90), ("", 140), ("wide", 140), ("0", 140)])
def test_a_piped_table_is_as_wide_as_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("hardware", "dgx-h100").out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert width - 5 < max(map(len, lines)) <= width


def test_help_names_every_command() -> None:
    outcome = run()
    assert outcome.code == 0
    assert all(name in outcome.out for name in ("plan", "show", "check", "emit", "hardware"))


def test_what_nobody_foresaw_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("hardware_profiles.profile_names", broken)
    outcome = run("hardware")
    assert outcome.code == 70
    assert outcome.err.splitlines() == [
        "internal error: KeyError: 'a\\nb'; please report it, with what `shardwright --debug ...` prints"
    ]
    with pytest.raises(KeyError):
        run("--debug", "hardware")


@pytest.mark.parametrize("installed", [True, False])
def test_the_demo_takes_the_clones_own_commands_or_writes_nothing(installed: bool, tmp_path: Path) -> None:
    """Also where none of them is on PATH."""
    (tmp_path / "examples").mkdir()
    demo = shutil.copy(EXAMPLES / "demo.sh", tmp_path / "examples")
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, lines in {"shardwright": "exit 0", "python": "echo found >&2\nexit 3"}.items() if installed else ():
        (commands / name).write_text(f"#!/bin/sh\n{lines}\n")
        (commands / name).chmod(0o755)
    ran = subprocess.run(
        ["bash", demo], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, timeout=600
    )
    said = "found\n" if installed else "error: shardwright is not installed; run make setup\n"
    assert (ran.returncode, ran.stderr) == (3 if installed else 2, said)
    assert (tmp_path / "demo-run").exists() == installed


@pytest.mark.slow
def test_as_a_process(tmp_path: Path) -> None:
    """One object on standard output, nothing else; a pipe that closes early leaves no traceback."""
    def shardwright(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "planner", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, env=environment, check=False)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    planned = shardwright("plan", *SMALL, "--cluster", "local-cpu:1x2", "--batch", 4, "-o", tmp_path / "plan.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    check_contract(json.loads(planned.stdout), 2)
    assert len(planned.stdout.splitlines()) == 1
    wrong = shardwright("plan", *SMALL, "--cluster", "local-cpu:1x2", "--batch", 0)
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith("error: --batch")
