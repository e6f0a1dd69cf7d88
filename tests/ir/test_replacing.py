"""Files that take their places together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from planner.ir.replacing import replacing


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder: files with what they hold, folders with nothing."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """What is to be replaced, and what is not."""
    folder = tmp_path / "program"
    (folder / "runtime" / "__pycache__").mkdir(parents=True)
    for name in ("train.py", "constants.json", "runtime/loop.py", "runtime/gone.py", "tokens.bin"):
        (folder / name).write_text(f"earlier {name}")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder to copy."""
    folder = tmp_path / "source"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "loop.py").write_text("new loop")
    (folder / "__pycache__" / "loop.pyc").write_text("compiled")
    return folder


def replace(program: Path, source: Path) -> None:
    with replacing() as files:
        files.write(program / "train.py", "new train")
        files.write(program / "new" / "deep" / "plan.yaml", "new plan")
        files.remove(program / "constants.json")
        files.copy(program / "runtime", source)


def test_all_take_their_places_and_nothing_else_is_touched(program: Path, source: Path) -> None:
    replace(program, source)
    assert tree(program) == {
        "train.py": b"new train", "new": None, "new/deep": None, "new/deep/plan.yaml": b"new plan", "runtime": None,
        "runtime/loop.py": b"new loop", "tokens.bin": b"earlier tokens.bin",
    }


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("call", "times"),
    [("pathlib.Path.write_text", 2), ("shutil.copyfile", 1), ("pathlib.Path.rename", 2), ("pathlib.Path.replace", 3)],
)
def test_wherever_it_is_left_all_is_as_it_was(
    program: Path, source: Path, monkeypatch: pytest.MonkeyPatch, call: str, times: int, error: BaseException
) -> None:
    """A full disk, or Ctrl-C, in each of the calls that write or move something."""
    before, (module, _, name) = tree(program), call.rpartition(".")
    owner = Path if module == "pathlib.Path" else __import__(module)
    done = getattr(owner, name)
    for last in range(times):

        def fails(*arguments: object, calls: Iterator[int] = count(), last: int = last, **named: object) -> object:  # noqa: B008
            if next(calls) == last:
                raise error
            return done(*arguments, **named)

        with monkeypatch.context() as patched:
            patched.setattr(call, fails)
            with pytest.raises(type(error)):
                replace(program, source)
        assert tree(program) == before, f"{call} number {last}"


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    real, link, circle = tmp_path / "disk" / "real.yaml", tmp_path / "plan.yaml", tmp_path / "circle.yaml"
    real.parent.mkdir()
    real.write_text("earlier")
    real.chmod(0o640)
    link.symlink_to(real)
    circle.symlink_to(circle)
    with replacing() as files:
        files.write(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OSError, match="symbolic links"), replacing() as files:
        files.write(circle, "new")
    assert sorted(os.listdir(tmp_path)) == ["circle.yaml", "disk", "plan.yaml"]


def test_a_link_to_nothing_is_written_through(tmp_path: Path, source: Path) -> None:
    """A file's, in a folder that is not there, and a folder's."""
    plan, program = tmp_path / "plan.yaml", tmp_path / "program"
    plan.symlink_to(tmp_path / "disk" / "real.yaml")
    program.symlink_to(tmp_path / "disk" / "program")
    with replacing() as files:
        files.remove(program / "constants.json")
        files.write(plan, "new")
        files.write(program / "train.py", "new train")
        files.copy(program / "runtime", source)
    assert plan.is_symlink() and program.is_symlink()
    assert tree(tmp_path / "disk") == {
        "real.yaml": b"new", "program": None, "program/train.py": b"new train", "program/runtime": None,
        "program/runtime/loop.py": b"new loop",
    }


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("kept")
    (tmp_path / "constants.json").symlink_to("real.json")
    with replacing() as files:
        files.remove(tmp_path / "constants.json")
    assert os.listdir(tmp_path) == ["real.json"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_replaced_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Where the file system can give it a second name; all is replaced where it cannot."""
    file, moved, there = tmp_path / "plan.yaml", Path.replace, list[bool]()
    file.write_text("earlier")

    def watched(path: Path, target: Path) -> Path:
        there.append(file.exists())
        return moved(path, target)

    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "replace", watched)
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    with replacing() as files:
        files.write(file, "new")
    assert there == [links] and tree(tmp_path) == {"plan.yaml": b"new"}


def test_a_folder_can_take_the_place_of_a_file(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program").write_text("earlier")
    before, moved = tree(tmp_path), Path.replace

    def fails(path: Path, target: Path) -> Path:
        if target.name == "plan.yaml":
            raise OSError(28, "No space left on device")
        return moved(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        with pytest.raises(OSError, match="No space"), replacing() as files:
            files.copy(tmp_path / "program", source)
            files.write(tmp_path / "plan.yaml", "new")
    assert tree(tmp_path) == before
    with replacing() as files:
        files.copy(tmp_path / "program", source)
    assert (tmp_path / "program" / "loop.py").read_text() == "new loop"
