"""What a program cannot write ends it with one line that says why, whatever wrote it."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ProgramError
from runtime.launch import parse_options
from runtime.loop import train
from runtime.metrics import StepReport, append
from tests.runtime.toy_program import Toy, build

REPORT = StepReport(3, 2.5, 1.0, 1e-3, 0.25, 4096.0, 0.5, 2**30)


class Full(io.FileIO):
    """A file on a full disk."""

    number = errno.ENOSPC

    def write(self, data: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


class Unread(Full):
    """A pipe whose reader has ended."""

    number = errno.EPIPE


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be written to; all can be opened and read."""
    plain = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **others: Any) -> Any:
        if mode[0] not in "wa":
            return plain(path, mode, *arguments, **others)
        file = io.BufferedWriter(Full(path, mode[0]))
        return file if "b" in mode else io.TextIOWrapper(file)

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--metrics", "--export-start", "--dump-gradients", "--checkpoint"])
@pytest.mark.parametrize("steps", [1, 2])
def test_no_space_is_one_line(alone: None, full: None, flag: str, steps: int, tmp_path: Path) -> None:
    path = tmp_path / "there"
    with pytest.raises(ProgramError) as refused:
        train(build(Toy()), parse_options(["--steps", str(steps), flag, str(path)]))
    said = "cannot be written (No space left on device); free space or give another path"
    assert str(refused.value).startswith(str(path)) and str(refused.value).endswith(said)
    assert not list(tmp_path.rglob("*.partial")), "what was written takes the room that is asked for"


@pytest.mark.parametrize(("steps", "kind", "said"), [
    ("1", Full, "No space left on device); free space or give another path"),
    ("2", Full, "No space left on device); free space or give another path"),
    ("1", Unread, "Broken pipe); what read it has ended: write to a file, and read that"),
])
def test_a_log_that_cannot_be_written_is_one_line(
    alone: None, steps: str, kind: type[Full], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that could not be told of is saved where that was asked for."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(kind(tmp_path / "log", "w"))))
    saving = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "1"]
    with pytest.raises(ProgramError) as refused:
        train(build(Toy()), parse_options(["--steps", steps, *saving]))
    assert str(refused.value) == f"standard output: cannot be written ({said}"
    assert [path.name for path in (tmp_path / "kept").glob("step-*")] == ["step-00000001"]


def test_metrics_hold_whole_lines_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there was room for is cut off again: a run that goes on appends to it."""
    path, plain = tmp_path / "metrics", Path.open
    append(path, REPORT)
    before = path.read_bytes()

    class Nearly(io.FileIO):
        """A file on a disk with room for ten bytes."""

        def write(self, data: Any) -> int:
            if self.tell() >= len(before) + 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:10])

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode="r": (
            io.TextIOWrapper(io.BufferedWriter(Nearly(path, "a"))) if mode == "a" else plain(path, mode)
        ))
        with pytest.raises(ProgramError, match="No space left"):
            append(path, REPORT)
    assert path.read_bytes() == before


def test_a_torn_line_of_metrics_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text('{"step": 2')
    append(path, REPORT)
    append(path, REPORT)
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"step": 2' and [json.loads(line)["step"] for line in whole] == [3, 3]


def test_an_archive_on_a_full_disk_names_the_disk(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer of archives says only that its file ends too soon."""
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", *rest: (
        io.BufferedWriter(Full(path, "w")) if path.name == "start.pt" and "w" in mode else plain(path, mode, *rest)
    ))
    with pytest.raises(ProgramError, match=r"start\.pt: cannot be written \(No space left on device\)"):
        train(build(Toy()), parse_options(["--steps", "1", "--export-start", str(tmp_path / "start.pt")]))
