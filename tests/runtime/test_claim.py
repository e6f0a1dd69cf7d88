"""One run at a time has a directory of checkpoints; nothing that a killed run leaves is in the way of the next."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from runtime import claim as module
from runtime.claim import FILE, claim
from runtime.errors import ProgramError
from runtime.launch import parse_options
from runtime.loop import train
from tests.runtime import cases
from tests.runtime.group import ProcessPool
from tests.runtime.toy_program import Toy, build

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from runtime.claim import claim

claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def another_run(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def claims(directory: Path) -> bool:
    file = claim(directory)
    if file is not None:
        os.close(file)
    return file is not None


def left_over(directory: Path, step: int) -> Path:
    partial = directory / f"step-{step:08d}.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    return partial


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_ones_directory_resumed(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.3)
    options = parse_options(["--steps", "1", "--checkpoint", str(tmp_path)])
    with another_run(tmp_path) as other:
        with pytest.raises(ProgramError) as refused:
            train(build(Toy()), options)
        assert str(refused.value).startswith(f"--checkpoint: {tmp_path} is in use by process {other.pid} on ")
        partial = left_over(tmp_path, 7)
        other.kill()
    train(build(Toy()), options)
    assert (tmp_path / "step-00000001").is_dir()
    assert not partial.exists(), "no run owns it"
    train(build(Toy()), parse_options(["--steps", "2", "--checkpoint", str(tmp_path)]))
    assert (tmp_path / "step-00000002").is_dir()


@pytest.mark.slow
def test_a_run_that_is_being_ended_is_waited_for(tmp_path: Path) -> None:
    with another_run(tmp_path) as other:
        Timer(1.0, other.kill).start()
        assert claims(tmp_path)


@pytest.mark.slow
def test_what_another_machine_holds_is_told_and_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lock can outlast it."""
    monkeypatch.setattr(module, "WAIT_S", 0.3)
    partial = left_over(tmp_path, 7)
    with another_run(tmp_path) as other:
        assert not partial.exists()
        partial = left_over(tmp_path, 8)
        monkeypatch.setattr(module, "_machine", lambda: "other")
        assert not claims(tmp_path) and partial.exists()
        assert f"warning: --checkpoint: {tmp_path} seems to be in use by process {other.pid}" in capsys.readouterr().err


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    partial = left_over(tmp_path, 7)
    monkeypatch.setattr(fcntl, "flock", refused)
    assert not claims(tmp_path) and partial.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": 1}'])
def test_a_claim_that_says_nothing_is_no_obstacle(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert claims(tmp_path) and claims(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["process"] == os.getpid()


def test_what_another_machine_may_be_writing_stays_for_an_hour(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"process": 1, "host": "one", "machine": "another"}))
    old, new = left_over(tmp_path, 700_000_000), left_over(tmp_path, 8)
    for path in (old, *old.iterdir()):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2 * module.OLD_S))
    assert claims(tmp_path)
    assert not old.exists() and new.exists()


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True])
def test_a_folder_that_each_node_has_of_its_own_is_refused_before_anything_is_removed(
    pool: ProcessPool, others: bool, tmp_path: Path
) -> None:
    for rank in (0, 1) if others else (0,):
        (tmp_path / str(rank) / "kept").mkdir(parents=True)
        left_over(tmp_path / str(rank) / "kept", 7)
    (tmp_path / "1").mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for said in pool.run(2, cases.refused_in_folders_of_their_own, Toy(data=2), str(tmp_path), ["--checkpoint", "kept"]):
        assert said.startswith("--checkpoint: rank 1 on ")
        assert said.endswith(" does not see in kept what rank 0 wrote there; give a folder that all nodes share")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    Timer(0.5, (tmp_path / "token").touch).start()
    assert module._appears(tmp_path, "token")


def test_a_folder_that_is_taken_away_is_called_that(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run on a machine that the lock does not reach."""
    def robbed(path: Path, text: str) -> int:
        shutil.rmtree(path.parent)
        return path.open("w").write(text)

    monkeypatch.setattr(Path, "write_text", robbed)
    with pytest.raises(ProgramError, match=r"partial: cannot be written .* its folder is gone, or not on this node: give"):
        train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(tmp_path / "kept")]))
