"""Folders of checkpoints: what they are called, and how one is told."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = re.compile(r"step-([0-9]{8,})(\.partial)?")
"""What checkpoints are called: the step, and whether they are unfinished."""


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint itself, not one of checkpoints: its list of tensors is there, whatever else is not."""
    return (path / ".metadata").is_file()


def is_complete(path: Path) -> bool:
    """Whether both files are there that are written last: a copy that was broken off may lack them."""
    return all((path / name).is_file() for name in (".metadata", "training.json"))


def newest_in(directory: Path) -> Path | None:
    """The complete checkpoint of the largest step in a directory, or None."""
    names = {path: FOLDER.fullmatch(path.name) for path in directory.iterdir()}
    steps = {int(name[1]): path for path, name in names.items() if name and not name[2] and is_complete(path)}
    return steps[max(steps)] if steps else None
