"""Standard output and standard error of the command, where what reads them is full, closed or gone."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from planner.ir.errors import InputError


class OutputError(InputError):
    """Standard output cannot be written: its disk is full."""


class ReaderGone(Exception):
    """What read standard output has ended, as `head` does."""

    exit_code = 141
    """What a shell makes of a program that SIGPIPE ends: 128 + 13."""


class _Output(TextIOWrapper):
    """Raises OutputError and ReaderGone: an OSError would not say which file it is of."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _lost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return ReaderGone()
    return OutputError("standard output", f"cannot be written ({error.strerror})", "write it to where there is room")


def leave_output() -> None:
    """Whatever is written to standard output from here on goes nowhere: Python writes the rest of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _Messages(TextIOWrapper):
    """Messages that nobody can read are no reason to stop."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            return


def watch_streams() -> None:
    """Put the two in the place of this process's own; a stream that is closed from the start goes nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = _like(sys.stdout, _Output)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _like(sys.stderr, _Messages)


def _like(stream: TextIOWrapper, kind: type[TextIOWrapper]) -> TextIOWrapper:
    return kind(
        stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
