"""Folders of checkpoints: what they are called, how one is told, and whether one is whole."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from .errors import ProgramError

FOLDER = re.compile(r"step-([0-9]{8,})(\.partial)?")
"""What checkpoints are called: the step, and whether they are unfinished."""
UNREADABLE = (Exception, CheckpointException)
"""What reading a mangled list of tensors raises: anything, for pickle does what the bytes say."""
INCOMPLETE = ("no complete checkpoint", "a directory that --checkpoint wrote")
REPLACE = "a complete checkpoint: remove or replace this one"
MANGLED = ("missing or mangled", REPLACE)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint itself, not one of checkpoints: its list of tensors is there, whatever else is not."""
    return (path / ".metadata").is_file()


def checkpoints_in(directory: Path) -> list[Path]:
    """The folders in a directory that are called as finished checkpoints are, that of the largest step first."""
    names = {path: FOLDER.fullmatch(path.name) for path in directory.iterdir() if path.is_dir()}
    steps = {path: int(name[1]) for path, name in names.items() if name and not name[2]}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def read_progress(path: Path) -> dict[str, Any]:
    """What a checkpoint's ``training.json`` says. Raises ProgramError where that is missing or no object of JSON."""
    file = path / "training.json"
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ProgramError(str(file), *MANGLED)
    return said


def check_files(path: Path) -> None:
    """Raise ProgramError where a checkpoint lacks a file or the end of one, as a broken-off copy or a power cut leaves it.
    Nothing is read but ``training.json`` and the list of tensors: bytes that have changed are not found."""
    read_progress(path)
    ends: dict[str, int] = {}
    try:
        for part in FileSystemReader(path).read_metadata().storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except UNREADABLE:
        raise ProgramError(str(path), *INCOMPLETE) from None
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise ProgramError(str(file), "is missing", REPLACE)
        if (size := file.stat().st_size) < end:
            raise ProgramError(str(file), f"ends after {size:,} of {end:,} bytes", REPLACE)


def sync(path: Path) -> None:
    """Return when a file's bytes, or the names in a folder, outlast a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some file systems have no such thing for folders.
            raise
    finally:
        os.close(file)
