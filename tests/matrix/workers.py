"""A group of worker processes, started once and shared by many cases: importing torch costs more than most cases."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.runtime.group import PRELOAD


@dataclass(frozen=True)
class Outcome:
    """What one rank's program left: its exit code, standard output and error, and a traceback where it raised."""

    code: int
    output: str
    error: str


def _purge(directory: Path) -> None:
    """Forget the modules of another program: every program has its own `model` and `runtime`."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("model", "runtime", "train"):
            del sys.modules[name]
    sys.path[:] = [str(directory), *(p for p in sys.path if not (Path(p or ".") / "train.py").exists())]


def _forget_meshes() -> None:
    """Empty DTensor's caches of sharding propagation: they return the mesh of an earlier program of the same shape, whose
    groups are gone. One process runs one program outside of these tests."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def _run_program(directory: Path, arguments: Sequence[str]) -> Outcome:
    import torch.distributed as dist

    _purge(directory)
    _forget_meshes()
    out, err = io.StringIO(), io.StringIO()
    code = 0
    saved, leave, run_at_exit = sys.argv, os._exit, atexit._run_exitfuncs
    os._exit = sys.exit  # type: ignore[assignment]  # A program that ends must not end the worker.
    atexit._run_exitfuncs = lambda: None  # Among them is the end of torch's libraries.
    sys.argv = [str(directory / "train.py"), *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001 - whatever a program raises is its outcome
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.argv, os._exit, atexit._run_exitfuncs = saved, leave, run_at_exit
        if dist.is_initialized():
            dist.destroy_process_group()
    return Outcome(code, out.getvalue(), err.getvalue())


def _serve(connection: Connection) -> None:
    import torch
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # A worker may have no children of its own.
    while True:
        task = connection.recv()
        if task is None:
            os._exit(0)  # Threads that a program left must not hold the process.
        environment, directory, arguments = task
        os.environ.update(environment)
        connection.send(_run_program(Path(directory), arguments))


class Workers:
    """Up to ``size`` processes, each started when it is first needed; a program of any such world size runs on the first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self, world: int) -> None:
        """Have as many processes as a program has ranks. They are forked from one that has imported torch."""
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for _ in range(len(self._pipes), world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, directory: Path, world: int, arguments: Sequence[str], *, timeout_s: float = 60) -> list[Outcome]:
        """Run ``directory/train.py`` as ``world`` ranks. A rank that dies or hangs gives exit code -1, and the group
        is started anew."""
        assert world <= self.size
        self._start(world)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank, pipe in enumerate(self._pipes[:world]):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }
            pipe.send((environment, str(directory), list(arguments)))
        outcomes = []
        broken = False
        for pipe in self._pipes[:world]:
            try:
                if pipe.poll(1 if broken else timeout_s):
                    outcomes.append(pipe.recv())
                    continue
            except (EOFError, ConnectionError):
                pass
            broken = True
            outcomes.append(Outcome(-1, "", "no answer: the rank died or hangs"))
        if broken:
            self.stop(kill=True)
        return outcomes

    def stop(self, *, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
            process.join(timeout=10)
        self._pipes, self._processes = [], []
