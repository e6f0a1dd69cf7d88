"""A second process that looks at attempts, where there is a second core.

Attempts know nothing of each other but the quickest step so far, so two can be looked at at once. The process is sent attempts
before their first look, goes on with the one of the lowest bound by itself, and tells what each look has found: a bound, and a
better plan if there was one. It is a convenience: where it cannot be started or ends, its attempts begin anew at home, with the
bounds that they had.
"""

from __future__ import annotations

import math
import pickle
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from planner.ir.plan import Plan, Prediction
from planner.search.best import Best
from planner.search.nodes import Attempt
from planner.search.paths import Pool
from planner.search.request import Look
from planner.search.solve import Task
from planner.search.stream import Stream
from planner.search.works import works

_PROGRAM = """
import os, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # What is printed is no answer.
sys.path.insert(0, {root!r})
from planner.search.helper import serve
serve(sys.stdin.buffer, answers)
"""


@dataclass(frozen=True)
class Order:
    """``step_s``: of the best plan so far. ``fresh``: another attempt, its name, its chains as one and its bound; ``dropped``:
    one that is looked at elsewhere."""

    step_s: float
    fresh: tuple[int, tuple[Task, ...], Stream, float] | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a look has found. ``plan``: looked at, where it is quicker than all before."""

    name: int
    bound: float
    finished: bool
    mixed: bool
    plan: tuple[Plan, Prediction] | None


class Helper:
    """The process, as the search sees it. ``away``: what it has, by name."""

    def __init__(self, look: Look, gap: float, deadline: float) -> None:
        """``deadline`` (time.perf_counter, which is the system's): when a look ends at the latest. Raises OSError where no
        process can be started, pickle.PicklingError and its like where ``look`` cannot be sent."""
        begin = pickle.dumps((look, gap, deadline))
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM.format(root=root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        self.away: dict[int, Attempt] = {}
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._sent, self._step_s = 0, math.inf
        self._orders.put(begin)
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    @property
    def least_s(self) -> float:
        """The lowest bound of what it has."""
        return min((attempt.bound for attempt in self.away.values()), default=math.inf)

    def send(self, attempt: Attempt, step_s: float) -> None:
        """Have an attempt looked at."""
        name, self._sent = self._sent, self._sent + 1
        self.away[name] = attempt
        self._order(Order(step_s, (name, attempt.tasks, attempt.counts.stream, attempt.bound)))

    def tell(self, step_s: float) -> None:
        """Say how quick the best plan is."""
        if step_s < self._step_s:
            self._order(Order(step_s))

    def back(self, target_s: float) -> Attempt | None:
        """An attempt that it has and has not looked at yet, nor looks at now: that of the highest bound below the target."""
        ranked = sorted((attempt.bound, name) for name, attempt in self.away.items() if attempt.bound < target_s)
        waiting = [name for _, name in ranked[1:] if not self.away[name].looks]
        if not waiting:
            return None
        self._order(Order(self._step_s, dropped=waiting[-1]))
        return self.away.pop(waiting[-1])

    def answer(self, wait_s: float = 0.0) -> tuple[Attempt | None, Answer] | None:
        """What was found next, and of which attempt (none where it came back meanwhile); None while nothing is known. Raises
        ProcessLookupError where the process has ended."""
        try:
            found = self._answers.get(timeout=wait_s) if wait_s > 0 else self._answers.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            raise ProcessLookupError
        ended = found.finished or found.mixed
        return (self.away.pop(found.name, None) if ended else self.away.get(found.name)), found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._orders.put(b"")

    def _order(self, order: Order) -> None:
        self._step_s = min(self._step_s, order.step_s)
        self._orders.put(pickle.dumps(order))

    def _write(self) -> None:
        assert self._process.stdin is not None
        # Where nobody reads any more, that is seen by who waits for answers.
        with suppress(OSError), self._process.stdin as sink:
            while order := self._orders.get():
                sink.write(order)
                sink.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with suppress(OSError, EOFError, pickle.UnpicklingError), self._process.stdout as source:
                while True:
                    self._answers.put(pickle.load(source))
        finally:
            self._answers.put(None)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Look at attempts until there are no more orders. Whoever gives them also hears of interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    look, gap, deadline = pickle.load(source)
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, orders), daemon=True).start()
    best, attempts, pool = Best(gap, look), dict[int, Attempt](), Pool()
    while True:
        left = [(attempt.bound, name) for name, attempt in attempts.items() if attempt.bound < best.target()]
        while not left or not orders.empty():
            order = orders.get()
            if order is None:
                return
            best.step_s = min(best.step_s, order.step_s)
            if order.fresh is not None:
                name, tasks, stream, bound = order.fresh
                attempts[name] = Attempt.made(tasks, stream, works(stream, tasks[0].candidate.accumulation), pool, bound)
            if order.dropped is not None:
                attempts.pop(order.dropped, None)
            left = [(attempt.bound, name) for name, attempt in attempts.items() if attempt.bound < best.target()]
        _, name = min(left)
        attempt, best.found = attempts[name], None
        finished = attempt.advance(best.target, deadline, gap, best.report)
        if finished or attempt.mixed:
            del attempts[name]
        pickle.dump(Answer(name, attempt.bound, finished, attempt.mixed, best.found), sink)
        sink.flush()


def _listen(source: BinaryIO, orders: queue.SimpleQueue[Order | None]) -> None:
    try:
        while True:
            orders.put(pickle.load(source))
    except EOFError:
        orders.put(None)
