"""Files that take their places together: where one of them cannot be written, all stay as they were."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass
class _Change:
    """``new`` is to lie at ``target`` (None: nothing is); what lay there before, where something did, waits at ``old``."""

    target: Path
    new: Path | None
    old: Path
    was_there: bool | None = None

    def set_aside(self) -> None:
        """Keep at ``old`` what lies at the target. A file that is replaced stays there until the new one takes its place, where
        the file system has a second name for it: nobody who reads meanwhile finds nothing."""
        if self.new is not None and self.new.is_file() and self.target.is_file():
            with suppress(OSError):
                self.old.hardlink_to(self.target)
                return
        self.target.rename(self.old)


class Replacement:
    """What :func:`replacing` writes. Links are followed, and a file keeps its permissions."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._folders: list[Path] = []

    def write(self, path: Path, text: str, mode: int | None = None) -> None:
        """A file. ``mode``: its permissions. Raises OSError."""
        new, target = self._change(path)
        if target.is_symlink():  # A circle of links leads nowhere.
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        new.write_text(text, encoding="utf-8")
        if mode is not None:
            new.chmod(mode)
        elif target.exists():
            shutil.copymode(target, new)

    def copy(self, path: Path, source: Path) -> None:
        """A folder, as ``source`` is, without what Python has compiled of it. Raises OSError."""
        new, _ = self._change(path)
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                copied = new / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)

    def remove(self, path: Path) -> None:
        """What lies there, if something does."""
        self._change(path, nothing=True)

    def _change(self, path: Path, *, nothing: bool = False) -> tuple[Path, Path]:
        """Where what is to lie at ``path`` waits, and where that is."""
        # What is to go is the link itself, wherever its folder is.
        target = Path(os.path.realpath(path.parent)) / path.name if nothing else Path(os.path.realpath(path))
        missing = [folder for folder in target.parents if not folder.exists()]
        self._folders += reversed(missing)
        target.parent.mkdir(parents=True, exist_ok=True)
        new, old = (target.with_name(f".shardwright-{os.getpid()}-{len(self._changes)}-{age}") for age in ("new", "old"))
        self._changes.append(_Change(target, None if nothing else new, old))
        return new, target

    def place(self) -> None:
        """Move all to their places. Raises OSError."""
        for change in self._changes:
            change.was_there = os.path.lexists(change.target)
            if change.was_there:
                change.set_aside()
            if change.new is not None:
                change.new.replace(change.target)

    def undo(self) -> None:
        """Put back what lay there, wherever :meth:`place` was left; folders that were made for it go."""
        for change in reversed(self._changes):
            if change.was_there is False or os.path.lexists(change.old):
                if change.target.is_dir() or not change.old.is_file():
                    _remove(change.target)
                if change.was_there:
                    change.old.replace(change.target)
        self.clear()
        for folder in reversed(self._folders):
            with suppress(OSError):
                folder.rmdir()

    def clear(self) -> None:
        """Remove what waits beside."""
        for change in self._changes:
            _remove(change.old)
            if change.new is not None:
                _remove(change.new)


@contextmanager
def replacing() -> Iterator[Replacement]:
    """Write files within; at its end they take their places. Whatever ends it otherwise, Ctrl-C too, leaves all as it was."""
    files = Replacement()
    try:
        yield files
        files.place()
    except BaseException:
        files.undo()
        raise
    files.clear()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
