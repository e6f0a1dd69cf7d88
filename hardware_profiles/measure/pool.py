"""Starting the processes of a measurement, hearing them, and ending them whatever happens."""

from __future__ import annotations

import datetime
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from . import machine as system
from . import worker
from .probes import COLLECTIVES, compute_probes, exchange_probes
from .settings import Machine, MeasureError, Measurement, Observation, Probe, Settings

Progress = Callable[[int, int, str], None]
"""(probes done, probes in all, what is timed now)."""
_ENDING_S = 5.0


def measure(settings: Settings, progress: Progress) -> Measurement:
    """Time every probe on ``settings.ranks`` processes at once. Raises :class:`MeasureError` where a process fails."""
    probes = (*compute_probes(settings), *exchange_probes(settings))
    total = len(probes) * settings.rounds
    seconds: dict[Probe, list[float]] = {probe: [] for probe in probes}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder, _processes(settings, probes, folder) as running:
        done = 0
        for rank, (kind, content) in _messages(running):
            if kind == "error":
                raise MeasureError("profile", f"rank {rank} failed ({content})", "try --ranks 1, or --quick")
            if kind == "facts":
                facts = content
            if kind == "probe":
                probe, value = content
                seconds[probe].append(value)
                if rank == 0:
                    done += 1
                    progress(done, total, describe(probe))
    machine = _machine(settings, facts)
    shared = max(1.0, settings.ranks / machine.cores) if machine.cores else 1.0
    # A rank that has half of a core needs twice its own seconds.
    return Measurement(machine, tuple(
        Observation(probe, statistics.median(values) * (shared if _computes(probe) else 1.0))
        for probe, values in seconds.items()
    ))


def _computes(probe: Probe) -> bool:
    """Timed by the thread's own seconds, not by the wall clock."""
    return probe.subject not in COLLECTIVES


def describe(probe: Probe) -> str:
    """A few words for the progress bar."""
    sizes = " x ".join(str(size) for size in probe.sizes)
    return " ".join(part for part in (probe.subject.replace("_", " "), probe.name, sizes, probe.dtype) if part)


@contextmanager
def _processes(
    settings: Settings, probes: tuple[Probe, ...], folder: str
) -> Iterator[dict[Connection, tuple[int, BaseProcess]]]:
    """The running ranks by the connection that each reports on. They are ended when the block is left."""
    context = get_context("spawn")
    address = str(Path(folder) / "meet")
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        for rank in range(settings.ranks):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, settings, probes, address, there)
            process: BaseProcess = context.Process(target=worker.run, args=arguments, daemon=True)
            _start(process)
            there.close()
            running[here] = (rank, process)
        yield running
    finally:
        for _, process in running.values():
            if process.is_alive():
                process.terminate()
        for connection, (_, process) in running.items():
            process.join(_ENDING_S)
            connection.close()


def _start(process: BaseProcess) -> None:
    """The terminal's interrupt reaches every process; only the parent shall act on it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


def _messages(running: dict[Connection, tuple[int, BaseProcess]]) -> Iterator[tuple[int, worker.Message]]:
    """What the ranks report, until all are done."""
    open_ = dict(running)
    while open_:
        for ready in wait(list(open_)):
            assert isinstance(ready, Connection)
            rank, process = open_[ready]
            try:
                message = ready.recv()
            except EOFError:
                process.join(_ENDING_S)
                raise MeasureError("profile", f"rank {rank} ended (exit {process.exitcode})", "try --ranks 1") from None
            if message[0] == "done":
                del open_[ready]
                process.join(_ENDING_S)
            yield rank, message


def _machine(settings: Settings, facts: dict[str, Any]) -> Machine:
    on_cpu = settings.device == "cpu"
    return Machine(
        chip=system.processor_name() if on_cpu else facts["chip"],
        device=settings.device, ranks=settings.ranks, cores=system.usable_cores() if on_cpu else 0.0,
        memory_bytes=system.memory_bytes() // settings.ranks if on_cpu else facts["memory_bytes"],
        reserve_bytes=facts["reserve_bytes"], training_dtype=facts["training_dtype"], torch_version=facts["torch"],
        date=datetime.date.today().isoformat(),
    )
