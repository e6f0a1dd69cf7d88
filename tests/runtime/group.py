"""Pools of worker processes, one pool a world size, that run cases as gloo groups."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "torch.distributed._composable.replicate_with_fsdp",
]
"""What every worker needs: imported once, by the process that they are forked from."""


class WorkerError(AssertionError):
    """A case failed on some rank; the message is its traceback."""


def _work(connection: Connection, path: list[str], rank: int, size: int, store: str) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (message := connection.recv()) is not None:
        case, arguments = message
        try:
            connection.send((True, case(*arguments)))
        except BaseException:  # noqa: BLE001 - whatever happened belongs to the parent
            connection.send((False, traceback.format_exc()))


class ProcessPool:
    """Workers are started when a world size is first asked for, and live until :meth:`close`.

    A world is never torn down between cases: torch keeps device meshes, and with them process groups, in caches.
    """

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._worlds: dict[int, list[tuple[Any, Connection]]] = {}
        self._directory = tempfile.TemporaryDirectory()
        self._started = 0

    def run(self, size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``case(*arguments)`` on ``size`` ranks; the results by rank. Raises WorkerError where a rank failed."""
        world = self._worlds.get(size) or self._start(size)
        for _, connection in world:
            connection.send((case, arguments))
        results = []
        for rank, (_, connection) in enumerate(world):
            if not connection.poll(120):
                self._end(size)
                raise WorkerError(f"rank {rank} of {size} did not answer")
            done, result = connection.recv()
            if not done:
                self._end(size)
                raise WorkerError(f"rank {rank} of {size}:\n{result}")
            results.append(result)
        return results

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
