"""How a program ends: under torchrun at once and with all that it said, elsewhere by returning."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import launch
from runtime.errors import ProgramError
from runtime.loop import train
from tests.runtime.toy_program import Toy, build

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, os, sys
from runtime import launch

class Late:
    def __del__(self, write=os.write):  # All that it names may be gone by then, and standard output with it.
        write(1, b"taken down\\n")

late = Late()
atexit.register(print, "registered")

def main():
    print("buffered")
    print("an error's line", file=sys.stderr)

launch.main_guard(main)
print("returned")
"""


def ended(environment: dict[str, str], program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """A process that runs the program with its output piped, which Python then buffers."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONUNBUFFERED")}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
        env={**inherited, **environment, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_under_torchrun_a_run_ends_with_0_and_all_that_it_said() -> None:
    done = ended({"RANK": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "buffered\nregistered\n", "an error's line\n")


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_cannot_be_said_leaves_the_exit_code(stream: str) -> None:
    """Also what is left of it to flush."""
    refused = PROGRAM.replace('    print("an error', '    raise launch.ProgramError("file", "is wrong")\n    print("an error')
    done = ended({"RANK": "0"}, f"import sys\nsys.{stream} = open('/dev/full', 'w')\n{refused}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == ("" if stream == "stderr" else "error: file: is wrong\n")


@pytest.mark.slow
def test_without_torchrun_a_run_returns() -> None:
    """A notebook goes on."""
    done = ended({})
    assert (done.returncode, done.stderr) == (0, "an error's line\n")
    assert done.stdout == "buffered\nreturned\nregistered\ntaken down\n"


@pytest.mark.parametrize(("rank", "local", "waits", "by"), [
    ("0", "0", [], ""), ("no number", "0", [], ""), ("8", "0", [launch.LEAVES_AFTER_S], "rank 8 on {}: "),
    ("11", "3", [launch.LEAVES_AFTER_S + 3 * launch.SAYS_AFTER_S], "rank 11 on {}: "),
    ("1", "no number", [launch.LEAVES_AFTER_S], "rank 1 on {}: "),
])
def test_wrong_input_leaves_with_2_and_one_line_from_the_first_that_torchrun_lets(
    rank: str, local: str, waits: list[float], by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise ProgramError("file", "is wrong", "another")

    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: None)
    with pytest.raises(SystemExit) as left:
        launch.main_guard(refused)
    assert left.value.code == 2 and capsys.readouterr().err == f"error: {by.format(platform.node())}file: is wrong; another\n"
    assert waited == waits


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "WORLD_SIZE: is not set beside RANK; start the program with torchrun"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR: is not set beside RANK; start the program with torchrun"),
        (
            {"WORLD_SIZE": "two", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "WORLD_SIZE: is 'two', no number; start the program with torchrun",
        ),
        (
            {"RANK": "first", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK: is 'first', no number; start the program with torchrun",
        ),
        (
            {"LOCAL_RANK": "-1", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "LOCAL_RANK: is '-1', no number; start the program with torchrun",
        ),
        (
            {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "auto"},
            "MASTER_PORT: is 'auto', no number; start the program with torchrun",
        ),
    ],
)
def test_half_of_torchruns_environment_is_named(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank started by hand, or by another launcher, that was not told where the others are."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProgramError) as wrong:
        launch.start(device="cpu")
    assert str(wrong.value) == said


@pytest.mark.parametrize(("accelerators", "sees", "device", "warned"), [
    (True, False, None, True), (False, False, None, False), (True, False, "cpu", False), (True, True, "cpu", False),
])
def test_cpu_cores_in_the_place_of_accelerators_are_told_of(
    accelerators: bool, sees: bool, device: str | None, warned: bool, alone: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once a run begins: what is wrong with one is still a single line."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: sees)
    world = launch.start(device=device, accelerators=accelerators)
    assert not capsys.readouterr().out
    train(replace(build(Toy()), world=world), launch.parse_options(["--steps", "1"]))
    said = "this plan is for accelerators and torch sees none: it trains on the CPU's cores"
    assert (said in capsys.readouterr().out.splitlines()) == warned


@pytest.mark.parametrize(("rank", "shown"), [(None, True), ("0", True), ("1", False)])
def test_help_is_shown_once(
    rank: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as left:
        launch.parse_options(["--help"])
    assert left.value.code == 0 and ("--checkpoint-every" in capsys.readouterr().out) is shown


@pytest.mark.slow
def test_what_one_rank_raises_ends_it_at_once() -> None:
    """The others may wait for it: nothing that needs them comes before its end, the process group's least of all."""
    raising = PROGRAM.replace('    print("an error', '    raise ZeroDivisionError("boom")\n    print("an error').replace(
        "import atexit, sys\n", "import atexit, sys, time\nimport torch.distributed as dist\n"
        "dist.is_initialized = lambda: True\ndist.destroy_process_group = lambda: time.sleep(1000)\n",
    )
    done = ended({"RANK": "1"}, raising)
    assert (done.returncode, done.stdout) == (1, "buffered\nregistered\n")
    assert "Traceback" in done.stderr and done.stderr.endswith("ZeroDivisionError: boom\n")
