"""Processes beside this one: Python programs that are told what to do, and answer, in pickles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import os, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # What is printed is no answer.
sys.path.insert(0, {root!r})
from {module} import {function}
{function}(sys.stdin.buffer, answers)
"""


def start_process(module: str, function: str, *, heard: bool) -> subprocess.Popen[bytes]:
    """A process that calls ``function(told, answers)`` of a module with two binary streams: what is written into its standard
    input, and what its standard output is to say. ``heard``: what else it prints appears on standard error. Raises OSError
    where no process can be started."""
    program = _PROGRAM.format(root=str(Path(__file__).resolve().parents[1]), module=module, function=function)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if heard else subprocess.DEVNULL,
    )
