"""The one error that a running program shows its user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


class ProgramError(Exception):
    """Wrong input: ``where`` names the file, field or flag, ``wrong`` what it holds, ``right`` what would be right.

    Rank 0 prints it as one line, or the rank that alone finds it, and every rank leaves with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, where: str, wrong: str, right: str = "") -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}" + (f"; {right}" if right else ""))


def raise_together(error: ProgramError | None) -> None:
    """Raise on every rank the error of the first rank that has one. Collective over the world."""
    own = None if error is None else (error.where, error.wrong, error.right)
    found: list[tuple[str, str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for parts in found:
        if parts is not None:
            raise ProgramError(*parts)


def unwritable(path: Path | str, cause: OSError) -> ProgramError:
    """What is said of a file (or of standard output) that a full disk, or whatever the system names, has kept from being
    written."""
    right = "free space or give another path"
    if isinstance(cause, FileNotFoundError):
        right = "its folder is gone, or not on this node: give every run a path of its own that all nodes share"
    if isinstance(cause, BrokenPipeError):
        right = "what read it has ended: write to a file, and read that"
    return ProgramError(str(path), f"cannot be written ({cause.strerror or cause})", right)


def cause_of(error: BaseException) -> BaseException:
    """The system's error that a library's came of: torch's writer of archives says that its file ends too soon, not why."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or error


@contextmanager
def writing_together(path: Path) -> Iterator[None]:
    """Where some rank cannot write what it writes inside, or raises ProgramError there, every rank raises it. Collective over
    the world."""
    error = None
    try:
        yield
    except ProgramError as found:
        error = found
    except (OSError, RuntimeError) as failure:
        cause = cause_of(failure)
        if not isinstance(cause, OSError):
            raise
        error = unwritable(path, cause)
    raise_together(error)
