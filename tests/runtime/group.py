"""Pools of worker processes, one pool a world size, that run cases as gloo groups."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "torch.distributed._composable.replicate_with_fsdp",
]
"""What every worker needs: imported once, by the process that they are forked from."""

GONE = "its process is gone"


class WorkerError(AssertionError):
    """A case failed on some rank; the message is its traceback."""


class WorkerKilled(WorkerError):
    """A rank's process was ended by a signal."""


def forget_groups() -> None:
    """End the groups of a program that is over. Those that are alive have threads that look for work a hundred times a second:
    some hundred programs later they would keep every core busy."""
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    # DTensor's sharding propagation returns the mesh of an earlier program of the same shape, whose groups are gone.
    debug._clear_sharding_prop_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # Objects in cycles hold groups.


def _work(connection: Connection, path: list[str], rank: int, size: int, store: str) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # What torch's modules hold is not looked through after every case.
    for count, (case, arguments) in enumerate(iter(connection.recv, None)):
        forget_groups()  # All ranks have answered: none waits for what another one's closed connection has not delivered.
        dist.init_process_group("gloo", init_method=f"file://{store}-{count}", rank=rank, world_size=size)
        try:
            connection.send((True, case(*arguments)))
        except BaseException:  # noqa: BLE001 - whatever happened belongs to the parent
            connection.send((False, traceback.format_exc()))


def _answer(connection: Connection) -> tuple[bool, Any]:
    """Whether a rank's case went through, and its result or what went wrong."""
    try:
        done, result = connection.recv()
    except EOFError:
        return False, GONE
    return done, result


def _ended(world: list[tuple[Any, Connection]], answers: Mapping[int, tuple[bool, Any]]) -> dict[int, int]:
    """The exit codes of processes that are gone, by rank: what their peers say is only that the connection was closed. On a
    busy machine the code of one that is gone comes late."""
    for rank, (process, _) in enumerate(world):
        process.join(10 if answers.get(rank) == (False, GONE) else 0.2)
    return {rank: process.exitcode for rank, (process, _) in enumerate(world) if process.exitcode is not None}


class ProcessPool:
    """Workers are started when a world size is first asked for, and live until :meth:`close`; groups end with the next case."""

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._worlds: dict[int, list[tuple[Any, Connection]]] = {}
        self._directory = tempfile.TemporaryDirectory()
        self._started = 0

    def run(self, size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``case(*arguments)`` on ``size`` ranks; the results by rank. Raises WorkerError where a rank failed.

        Where a process was ended by a signal, the case is run once more, with a warning: in one suite of some dozens a thread
        of gloo's dies in malloc (``pt_gloo_runloop``, general protection fault). A crash that comes again fails.
        """
        try:
            return self._run(size, case, arguments)
        except WorkerKilled as error:
            warnings.warn(f"run again: {error}", stacklevel=2)
            return self._run(size, case, arguments)

    def _run(self, size: int, case: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        world = self._worlds.get(size) or self._start(size)
        for _, connection in world:
            connection.send((case, arguments))
        answers = {}
        for rank, (_, connection) in enumerate(world):
            if connection.poll(120 if all(done for done, _ in answers.values()) else 5):
                answers[rank] = _answer(connection)
        if len(answers) == size and all(done for done, _ in answers.values()):
            return [result for _, result in answers.values()]
        ended = _ended(world, answers)
        self._end(size)
        failed = {rank: result for rank, (done, result) in answers.items() if not done}
        missing = {rank: "did not answer" for rank in range(size) if rank not in answers}
        gone = {rank: f"ended with exit code {code}" for rank, code in ended.items()}
        said = {**gone, **failed, **missing, **gone}
        kind = WorkerKilled if any(code < 0 for code in ended.values()) else WorkerError
        raise kind("\n".join(f"rank {rank} of {size}: {what}" for rank, what in said.items()))

    def close(self) -> None:
        """End all workers."""
        for size in list(self._worlds):
            self._end(size)

    def _end(self, size: int) -> None:
        for process, _ in self._worlds.pop(size):
            process.terminate()
            process.join()

    def _start(self, size: int) -> list[tuple[Any, Connection]]:
        self._started += 1
        store = str(Path(self._directory.name) / f"store-{self._started}")
        world = []
        for rank in range(size):
            own, other = self._context.Pipe()
            process = self._context.Process(target=_work, args=(other, sys.path, rank, size, store), daemon=True)
            process.start()
            world.append((process, own))
        self._worlds[size] = world
        return world
