"""Nothing that a run writes is something else of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import launch
from runtime.errors import ProgramError
from runtime.launch import check_outputs, parse_options
from runtime.loop import train
from tests.runtime.toy_program import Toy, build


@pytest.fixture
def place(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, data and a checkpoint, to which paths are relative."""
    launch.start(device="cpu")
    monkeypatch.chdir(tmp_path)
    program = ("program/runtime/data.py", "program/train.py", "program/plan.yaml")
    for name in (*program, "text.tokens", "kept/step-00000001/.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.tokens").symlink_to("text.tokens")
    (tmp_path / "link").symlink_to("kept/step-00000001")
    monkeypatch.setattr(launch, "PROGRAM", tmp_path / "program")
    return tmp_path


@pytest.mark.parametrize(("arguments", "said"), [
    ("--metrics a --export-start a", "--export-start: a is --metrics; a file of its own"),
    ("--metrics a --dump-gradients kept/../a", "--dump-gradients: kept/../a is --metrics"),
    ("--export-start a --dump-gradients a", "--dump-gradients: a is --export-start"),
    ("--metrics text.tokens --data text.tokens", "--metrics: text.tokens is --data"),
    ("--export-start link.tokens --data text.tokens", "--export-start: link.tokens is --data"),
    ("--metrics new --checkpoint new", "--metrics: new is --checkpoint"),
    ("--metrics kept/step-00000001/log --checkpoint kept", "--metrics: kept/step-00000001/log is inside "),
    ("--metrics kept/step-00000009/log --checkpoint kept", "--metrics: kept/step-00000009/log is inside "),
    ("--export-start kept/step-00000001/.metadata --init-from kept", "--export-start: kept/step-00000001/.metadata is inside "),
    ("--dump-gradients kept/step-00000001/new/g --checkpoint new", "--dump-gradients: kept/step-00000001/new/g is inside "),
    ("--metrics link/.metadata", "--metrics: link/.metadata is inside "),
    ("--metrics program/train.py", "--metrics: program/train.py is train.py of this program"),
    ("--export-start program/plan.yaml", "--export-start: program/plan.yaml is plan.yaml of this program"),
    ("--metrics program/runtime/data.py", "--metrics: program/runtime/data.py is inside "),
])
def test_what_would_be_written_over_is_refused(place: Path, arguments: str, said: str) -> None:
    with pytest.raises(ProgramError) as refused:
        check_outputs(parse_options(arguments.split()))
    assert str(refused.value).startswith(said)
    assert not (place / "a").exists() and not (place / "new").exists()


@pytest.mark.parametrize(("directory", "said"), [
    ("kept/step-00000001", "kept/step-00000001 is a checkpoint; give the folder that it is in, or --init-from"),
    ("kept/../kept/step-00000001/", "kept/../kept/step-00000001 is a checkpoint; "),
    ("kept/step-00000001/more", "kept/step-00000001/more is inside the checkpoint "),
])
def test_checkpoints_are_not_saved_inside_of_one(place: Path, directory: str, said: str) -> None:
    with pytest.raises(ProgramError) as refused:
        check_outputs(parse_options(["--checkpoint", directory]))
    assert str(refused.value).startswith(f"--checkpoint: {said}")
    assert [path.name for path in (place / "kept/step-00000001").iterdir()] == [".metadata"]


@pytest.mark.parametrize("arguments", [
    "--metrics a --export-start b --dump-gradients c --data text.tokens --checkpoint kept",
    "--metrics program/log --checkpoint program/kept", "--metrics kept/log --checkpoint kept",
])
def test_what_is_apart_is_not(place: Path, arguments: str) -> None:
    check_outputs(parse_options(arguments.split()))


@pytest.mark.parametrize(("arguments", "right"), [
    ("--checkpoint kept", "a folder that this user may write to"),
    ("--metrics kept/log", "a file in a folder that this user may write to"),
    ("--metrics text.tokens", "a file that may be written over"), ("--metrics kept", "a file that may be written over"),
    ("--checkpoint text.tokens/kept", "a folder that can be made"),
])
def test_what_cannot_be_written_is_told_by_what_keeps_it_from_it(
    place: Path, arguments: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # For root everything is writable.
    with pytest.raises(ProgramError) as refused:
        check_outputs(parse_options(arguments.split()))
    assert str(refused.value).endswith(f" cannot be written; {right}")


def test_no_folder_of_the_users_is_taken_for_one_of_the_exports(alone: None, tmp_path: Path) -> None:
    """Not even that of the run's own checkpoints."""
    for folder in ("start.pt.partial", "gradients.pt.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes").touch()
    run = ["--steps", "1", "--checkpoint", str(tmp_path / "start.pt.partial")]
    asked = ["--export-start", str(tmp_path / "start.pt"), "--dump-gradients", str(tmp_path / "gradients.pt")]
    train(build(Toy()), parse_options([*run, *asked]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gradients.pt", "gradients.pt.partial", "start.pt", "start.pt.partial",
    ]
    assert (tmp_path / "gradients.pt.partial" / "notes").exists()
    assert {"notes", "step-00000001"} <= {path.name for path in (tmp_path / "start.pt.partial").iterdir()}


@pytest.mark.slow
def test_a_resumed_run_leaves_what_is_of_the_beginning(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is started again by the same command would write a later step's weights over the first's."""
    start, gradients = tmp_path / "start.pt", tmp_path / "gradients.pt"
    run = ["--checkpoint", str(tmp_path / "kept"), "--export-start", str(start), "--dump-gradients", str(gradients)]
    train(build(Toy()), parse_options(["--steps", "1", *run]))
    written = start.read_bytes()
    gradients.unlink()
    capsys.readouterr()
    other = tmp_path / "other"
    train(build(Toy()), parse_options(["--steps", "2", *run, "--seed", "7", "--init-from", str(other)]))
    assert capsys.readouterr().out.splitlines()[1:5] == [
        "--seed: 7 is not taken: this run resumes, with its checkpoint's, which is 0",
        f"--init-from: {other} is not read: it is of the beginning, and this run resumes",
        f"--export-start: {start} is left as it is: it is of the beginning, and this run resumes",
        f"--dump-gradients: {gradients} is not written: it is of the beginning, and this run resumes",
    ]
    assert start.read_bytes() == written and not gradients.exists()
