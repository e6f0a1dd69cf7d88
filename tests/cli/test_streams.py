"""Standard output that is full, and one that nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import EXAMPLES, Outcome

FULL = Path("/dev/full")


def shardwright(*arguments: object, out: int, unbuffered: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *map(str, arguments)], stdout=out, stderr=subprocess.PIPE, text=True,
        cwd=EXAMPLES.parent, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1" * unbuffered},
    )


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("show", "{plan}"), ("check", "{plan}", "--json"), ("hardware",), ("show", "--help")])
def test_full_standard_output_is_one_line(arguments: tuple[str, ...], planned: tuple[Path, Outcome]) -> None:
    with FULL.open("wb") as full:
        said = shardwright(*(part.format(plan=planned[0]) for part in arguments), out=full.fileno(), unbuffered=False)
    assert said.returncode == 2
    assert said.stderr == (
        "error: standard output: cannot be written (No space left on device); write it to where there is room\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("arguments", [("check", "{plan}", "--json"), ("check", "{plan}"), ("hardware",), ("--help",)])
def test_a_closed_pipe_is_no_plan_that_does_not_fit(
    arguments: tuple[str, ...], unbuffered: bool, planned: tuple[Path, Outcome]
) -> None:
    """Exit 141, as of what SIGPIPE ends, and no word."""
    reader, writer = os.pipe()
    os.close(reader)
    said = shardwright(*(part.format(plan=planned[0]) for part in arguments), out=writer, unbuffered=unbuffered)
    os.close(writer)
    assert (said.returncode, said.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_messages_that_cannot_be_written_change_nothing() -> None:
    with FULL.open("wb") as full:
        command = [sys.executable, "-m", "planner", "emit", "missing.yaml"]
        assert subprocess.run(command, stderr=full, cwd=EXAMPLES.parent, check=False).returncode == 2
