"""A group of worker processes, started once and shared by many cases: importing torch costs more than most cases."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.compiled import compile_once
from tests.runtime.group import PRELOAD, forget_groups

HUNG = -int(signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """What one rank's program left: its exit code (negative: the signal that ended its process, :data:`HUNG` where it had to be
    ended; 1 where it is gone without a word), standard output and error, and a traceback where it raised. ``gone``: its process
    is."""

    code: int
    output: str
    error: str
    gone: bool = False

    @property
    def crashed(self) -> bool:
        """Whether a signal that nobody had sent ended it."""
        return self.code < 0 and self.code != HUNG


def _purge(directory: Path) -> None:
    """Forget the modules of another program: every program has its own `model` and `runtime`."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("model", "runtime", "train"):
            del sys.modules[name]
    sys.path[:] = [str(directory), *(p for p in sys.path if not (Path(p or ".") / "train.py").exists())]


def _run_program(directory: Path, script: Path, arguments: Sequence[str]) -> Outcome:
    _purge(directory)
    out, err = io.StringIO(), io.StringIO()
    code = 0
    saved, leave, run_at_exit, sleep = sys.argv, os._exit, atexit._run_exitfuncs, time.sleep
    os._exit = sys.exit  # type: ignore[assignment]  # A program that ends must not end the worker.
    if os.environ["RANK"] != "0":  # A rank that is refused waits for torchrun to end it, which is not here.
        time.sleep = lambda seconds: sleep(min(seconds, 0.1))
    atexit._run_exitfuncs = lambda: None  # Among them is the end of torch's libraries.
    sys.argv = [str(script), *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001 - whatever a program raises is its outcome
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.argv, os._exit, atexit._run_exitfuncs, time.sleep = saved, leave, run_at_exit, sleep
        forget_groups()
    return Outcome(code, out.getvalue(), err.getvalue())


def _serve(connection: Connection, stacks: str) -> None:
    """``stacks``: where the Python stacks of a process go that a signal ends."""
    import torch
    import torch._inductor.config

    # As long as the process: the file's descriptor is written to when a signal ends it.
    file = open(stacks, "w")  # noqa: SIM115
    faulthandler.enable(file)
    faulthandler.register(-HUNG, file, chain=True)
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # A worker may have no children of its own.
    compile_once()
    gc.freeze()  # What torch's modules hold is not looked through after every program.
    while True:
        task = connection.recv()
        if task is None:
            os._exit(0)  # Threads that a program left must not hold the process.
        environment, directory, script, arguments = task
        os.environ.update(environment)
        connection.send(_run_program(directory, script, arguments))


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path

    def outcome(self, timeout_s: float) -> Outcome:
        """What its program left; where it does not answer in time, its process is ended and says where it was."""
        hung = False
        with contextlib.suppress(EOFError, ConnectionError):
            if self.pipe.poll(timeout_s):
                outcome: Outcome = self.pipe.recv()
                return outcome
            assert self.process.pid is not None
            hung = True
            os.kill(self.process.pid, -HUNG)
        self.process.join(timeout=60)
        if self.process.exitcode is None:  # Neither gone nor, on a busy machine, done with saying where it was.
            self.process.kill()
            self.process.join()
        code = HUNG if hung else self.process.exitcode
        why = f"no answer in {timeout_s:g} s" if hung else f"its process ended with exit code {code}"
        return Outcome(code or 1, "", f"{why}\n{self.stacks.read_text()}", gone=True)


class Workers:
    """Up to ``size`` processes, each started when it is first needed; a program of any such world size runs on the first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory()

    def _start(self, world: int) -> None:
        """Have as many processes as a program has ranks. They are forked from one that has imported torch."""
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(len(self._workers), world):
            here, there = context.Pipe()
            stacks = Path(self._directory.name) / f"stacks-{rank}"
            process = context.Process(target=_serve, args=(there, str(stacks)), daemon=True)
            process.start()
            there.close()
            self._workers.append(_Worker(process, here, stacks))

    def run(
        self, directory: Path, world: int, arguments: Sequence[str], *, script: Path | None = None, timeout_s: float = 120
    ) -> list[Outcome]:
        """Run ``directory/train.py``, or a ``script`` about the program there, as ``world`` ranks. Where a rank died or
        hung, the group is started anew.

        Where a process was ended by a signal, the program is run once more, with a warning, as in
        :class:`tests.runtime.group.ProcessPool` and for its reason. A crash that comes again is the outcome.
        """
        metrics = Path(arguments[arguments.index("--metrics") + 1]) if "--metrics" in arguments else None
        written = metrics.read_bytes() if metrics is not None and metrics.is_file() else b""
        script = script or directory / "train.py"
        outcomes = self._run(directory, world, script, arguments, timeout_s)
        crashed = [f"rank {rank} of {world}: {o.error}" for rank, o in enumerate(outcomes) if o.crashed]
        if not crashed:
            return outcomes
        warnings.warn("run again: " + "\n".join(crashed), stacklevel=2)
        if metrics is not None and metrics.is_file():
            metrics.write_bytes(written)  # Programs append to it.
        return self._run(directory, world, script, arguments, timeout_s)

    def _run(
        self, directory: Path, world: int, script: Path, arguments: Sequence[str], timeout_s: float
    ) -> list[Outcome]:
        assert world <= self.size
        self._start(world)
        # The port stays bound until all is over, so that nothing else is given it; who sets this option too may listen there.
        with socket.socket() as kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            for rank, worker in enumerate(self._workers[:world]):
                environment = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1]),
                }
                worker.pipe.send((environment, directory, script, list(arguments)))
            outcomes: list[Outcome] = []
            for worker in self._workers[:world]:
                broken = any(outcome.gone for outcome in outcomes)
                outcomes.append(worker.outcome(1 if broken else timeout_s))
        if any(outcome.gone for outcome in outcomes):
            self.stop(kill=True)
        return outcomes

    def stop(self, *, kill: bool = False) -> None:
        for worker in self._workers:
            if kill:
                worker.process.kill()
            else:
                with contextlib.suppress(BrokenPipeError):
                    worker.pipe.send(None)
            worker.process.join(timeout=10)
        self._workers = []
