"""Programs as users start them: under torchrun, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

Run = subprocess.CompletedProcess[str]


class HungError(AssertionError):
    """A program did not end; the message is what it had printed, and where each of its ranks was."""


def torchrun(
    ranks: int, *arguments: str, environment: Mapping[str, str] | None = None, directory: Path | None = None,
    timeout_s: float = 300, appends: Sequence[Path] = (),
) -> Run:
    """Run a program (the first of ``arguments``) under torchrun, its output piped.

    Where it hangs it is run once more, with a warning that says where every rank was: among thousands of runs one stood still,
    as some died in gloo's threads (:class:`tests.runtime.group.ProcessPool`). One that hangs again fails. ``appends``: files
    that it appends to, which are removed before it runs again.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
    # With faulthandler a process that is aborted says where its threads are.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), "PYTHONFAULTHANDLER": "1"}
    try:
        return _run(command, variables, directory, timeout_s)
    except HungError as error:
        warnings.warn(f"run again: {error}", stacklevel=2)
        for file in appends:
            file.unlink(missing_ok=True)
        return _run(command, variables, directory, timeout_s)


def _run(command: list[str], variables: Mapping[str, str], directory: Path | None, timeout_s: float) -> Run:
    agent = subprocess.Popen(
        command, env=variables, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
    )
    try:
        output, error = agent.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _abort_children(agent.pid)
        try:
            output, error = agent.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            agent.kill()
            output, error = agent.communicate()
        raise HungError(f"no end in {timeout_s:g} s\n{output}\n{error}") from None
    return subprocess.CompletedProcess(command, agent.returncode, output, error)


def _abort_children(parent: int) -> None:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGABRT)
