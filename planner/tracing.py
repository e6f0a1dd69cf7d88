"""Tracing the model of a job, in a process of its own where that saves time.

To import torch and to trace takes most of a plan's first seconds, and nothing after it needs torch: while another process does
that, this one reads what else planning needs. Where torch is here already, the model is traced here.
"""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from planner.collection import leave_at_exit, no_collection
from planner.ir.errors import InternalError, ModelError, ShardwrightError
from planner.workers import start_process

if TYPE_CHECKING:
    from planner.ir.graph import ModelGraph


@dataclass(frozen=True)
class Wanted:
    """What is to be traced, as a job names it: ``dtype`` is torch's name."""

    model: str
    settings: Mapping[str, object]
    sequence: int | None
    dtype: str


Trace: TypeAlias = "Callable[[Wanted], ModelGraph]"
"""Raises ModelError where the model cannot be loaded or traced faithfully."""


def trace_here(wanted: Wanted) -> ModelGraph:
    """Trace a model in this process."""
    from planner.trace import load_model, trace_model

    source = load_model(wanted.model, wanted.settings, wanted.sequence)
    return trace_model(source, sequence=wanted.sequence, dtype=wanted.dtype)


@contextmanager
def tracing_ahead() -> Iterator[Trace]:
    """Start to import torch for one model that is to be traced soon, beside this process, unless it is here already."""
    tracer = None
    if "torch" not in sys.modules:
        with suppress(OSError):
            tracer = Tracer()
    try:
        yield trace_here if tracer is None else tracer
    finally:
        if tracer is not None:
            tracer.close()


@dataclass(frozen=True)
class _Asked:
    """``path``: where modules are looked for."""

    wanted: Wanted
    path: tuple[str, ...]


class Tracer:
    """A process that traces one model, as this one sees it."""

    def __init__(self) -> None:
        """It starts, and imports torch. Raises OSError where no process can be started."""
        self._process = start_process("planner.tracing", "serve", heard=True)

    def __call__(self, wanted: Wanted) -> ModelGraph:
        """See :data:`Trace`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(_Asked(wanted, tuple(sys.path)), self._process.stdin)
            self._process.stdin.close()
            answer: ModelGraph | Exception = pickle.load(self._process.stdout)
            self._process.kill()  # To take Python and torch down would keep a core busy for half a second.
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ModelError(wanted.model, *_ending(self._process.wait())) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


def _ending(code: int) -> tuple[str, str]:
    """How the process ended, by its exit code (negative: the signal), and what would be right."""
    if code >= 0:
        return f"the process that traces it ended with exit code {code}", "it must not end Python"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    if -code == signal.SIGKILL:
        return f"the process that traces it was ended by signal {name}", "it must fit in memory without its weights"
    return (f"torch crashed while tracing it, by signal {name}",
            "find the operation that does it: trace parts of forward alone")


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Trace what is asked for, once. Whoever asks also hears of interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_at_exit()
    with no_collection():
        with suppress(ImportError):  # who asks is told
            import torch

            import planner.trace  # noqa: F401  # while nothing is asked for yet

            # There is work for the other cores, and filling small tensors in parallel waits for them.
            torch.set_num_threads(1)
        try:
            asked: _Asked = pickle.load(source)
        except (OSError, EOFError, pickle.UnpicklingError):
            return  # Whoever asks has ended, maybe within the question.
        sys.path[:] = asked.path
        answer = _answer(asked.wanted)
        sys.stdout.flush()  # Who has the answer ends this process.
        sink.write(answer)
        sink.flush()


def _answer(wanted: Wanted) -> bytes:
    """The graph, or what was raised, with the traceback as a note."""
    try:
        return pickle.dumps(trace_here(wanted))
    except BaseException as error:  # noqa: BLE001 - whatever it is, who asked raises it
        known: ShardwrightError = InternalError(type(error).__name__, str(error))
        if isinstance(error, ShardwrightError):
            known = error
        elif not isinstance(error, Exception):  # The model's own: interrupts are heard by who asks.
            known = ModelError(wanted.model, f"raises {type(error).__name__}", "it must not end Python")
        known.add_note(traceback.format_exc())
        return pickle.dumps(known)
