"""Where in the user's own code an exception or a traced operation comes from."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path
from traceback import walk_tb

from planner.ir.body import Source

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_OURS = str(Path(__file__).parent)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is the model's (its libraries' included): not torch's (nor sympy's, which writes out torch's
    conditions), Python's or the tracer's."""
    standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    compiled = file.endswith(".pyx")  # By a path that is relative to nothing here, which looks like the user's.
    torchs = "/torch/" in file or "-packages/sympy/" in file
    return not (standard or compiled or torchs or file.startswith((_OURS, "<")))


def users_line(error: BaseException, folder: Path | None = None) -> str | None:
    """``file:line`` of the innermost of the user's lines that an exception passed through.

    Lines of files under ``folder`` come first. A syntax error names its own place.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    mine = [(file, line) for file, line in places if is_users(file)]
    own = [(file, line) for file, line in mine if folder is not None and folder.resolve() in Path(file).resolve().parents]
    chosen = (own or mine)[-1:]
    return f"{chosen[0][0]}:{chosen[0][1]}" if chosen else None


def passed_through(error: BaseException, function: str) -> bool:
    """Whether an exception came out of a function of this name."""
    return any(frame.f_code.co_name == function for frame, _ in walk_tb(error.__traceback__))


def running_line() -> str:
    """``file:line`` of the user's code that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def first_line(error: BaseException) -> str:
    """The first line that an exception says, else its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


@functools.lru_cache(maxsize=100_000)
def source_of(stack_trace: str | None) -> Source | None:
    """The innermost line of a stack trace that is not torch's own."""
    frames = _FRAME.findall(stack_trace or "")
    for file, line, code in reversed(frames):
        if is_users(file):
            return Source(file, int(line), code.strip())
    return None
