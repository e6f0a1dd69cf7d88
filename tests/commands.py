"""Running the command line inside the test's process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def small(**settings: int) -> tuple[str, ...]:
    """A model of four blocks that is traced in a second, with other settings."""
    chosen = {"layers": 2, "hidden": 64, "vocab": 64} | settings
    flags = [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
    return (f"{EXAMPLES / 'gpt.py'}:gpt", *flags, "--seq", "32")


SMALL = small()


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        assert "Traceback" not in self.out + self.err
        return lines[0]


def run(*arguments: object) -> Outcome:
    """`shardwright` with these arguments."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = int(left.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())
