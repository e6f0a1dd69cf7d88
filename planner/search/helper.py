"""A second process that looks at nodes of the search, where there is a second core.

Nodes know nothing of each other but the quickest step so far, so two can be looked at at once. The process knows what the
search knows from the beginning on (:class:`~planner.search.families.Scope`), is sent kin that is not counted yet and attempts
before their first look, goes on with the node of the lowest bound by itself, and tells what each look has found: a
bound, and a better plan if there was one. It is a convenience: where it cannot be started or ends, its nodes begin anew at
home, with the bounds that they had.
"""

from __future__ import annotations

import math
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from cost_models.pipeline import CriticalPath
from hardware_profiles import Cluster
from planner.collection import only_new_collected
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction, TensorAxis
from planner.search.best import Best
from planner.search.branches import Branches, Opened
from planner.search.candidates import Candidate, candidates_of
from planner.search.chain import Name
from planner.search.families import Scope
from planner.search.nodes import Attempt, Kin, Sketch
from planner.search.prices import Prices
from planner.search.request import Look, Request
from planner.search.tensor_axes import KnownAxis, TensorAxes
from planner.workers import start_process

WORTH_AGAIN = 2
"""An attempt that had more looks is not begun anew elsewhere."""


@dataclass(frozen=True)
class Fresh:
    """A node for the helper. ``kin``: its candidates, their bounds and whether they were counted roughly; ``chains``: of an
    attempt. ``opened``: of one that was looked at, or of a part of it, its branches; ``finished_s``: of those before; with the
    ``paths`` that are known."""

    name: int
    candidate: Candidate
    bound: float
    kin: tuple[tuple[Candidate, float, bool], ...] = ()
    chains: tuple[Name, ...] = ()
    opened: tuple[Opened, ...] = ()
    finished_s: float = math.inf
    paths: tuple[CriticalPath, ...] = ()

    @staticmethod
    def of(name: int, node: Kin | Attempt) -> Fresh:
        """A node of the search."""
        if isinstance(node, Kin):
            kin = tuple((each.candidate, each.bound, each.rough) for each in node.sketches)
            return Fresh(name, node.candidate, node.bound, kin)
        chains = tuple(task.chain.name for task in node.tasks)
        if node.branches is None:
            return Fresh(name, node.candidate, node.bound, (), chains)
        branches, paths = node.branches, tuple(node.counts.paths.all)
        return Fresh(name, node.candidate, node.bound, (), chains, branches.opened, branches.finished_s, paths)

    def node(self, scope: Scope) -> Kin | Attempt:
        """As the helper has it."""
        if self.kin:
            return Kin(tuple(Sketch(candidate, bound, rough=rough) for candidate, bound, rough in self.kin))
        family = scope.family(self.candidate)
        assert family is not None
        chosen = family.chosen(self.chains)
        assert len(chosen) == len(self.chains)
        (bundle,) = family.bundles([chosen])
        attempt = Attempt.of(self.candidate, scope, bundle, self.bound)
        if self.opened:
            attempt.counts.paths.add(self.paths)
            attempt.branches = Branches(attempt.counts, self.opened, finished_s=self.finished_s)
            attempt.whole = False
        return attempt


@dataclass(frozen=True)
class Order:
    """``step_s``: of the best plan so far. ``fresh``: further nodes; ``dropped``: one that is looked at elsewhere; ``asks``:
    whether there is nothing to do elsewhere, and something is to be given back."""

    step_s: float
    fresh: tuple[Fresh, ...] = ()
    dropped: int | None = None
    asks: bool = False


@dataclass(frozen=True)
class Answer:
    """What a look has found. ``bounds``: of kin, those of its sketches; ``rough``: whether they were counted no closer, for
    want of a target. ``plan``: looked at, where it is quicker than all before. ``given``: an attempt that is given back, or a
    part of one that is not ``finished`` with that."""

    name: int
    bound: float
    finished: bool
    mixed: bool = False
    plan: tuple[Plan, Prediction] | None = None
    bounds: tuple[float, ...] = ()
    rough: bool = False
    given: Fresh | None = None


@dataclass(frozen=True)
class Space:
    """What a search is about whose candidates are to be placed and bounded, before it begins: until there is another order,
    tensor axis by tensor axis, the widest first."""

    graph: ModelGraph
    cluster: Cluster
    request: Request


@dataclass(frozen=True)
class Taken:
    """A tensor axis that is placed and bounded elsewhere."""

    axis: TensorAxis


@dataclass(frozen=True)
class Begin:
    """What the search is about. ``deadline`` (time.perf_counter, which is the system's): when a look ends at the latest."""

    look: Look
    gap: float
    most_s: float
    scope: Scope
    deadline: float

    def beside(self, prices: Prices) -> Begin:
        """With these prices of the same candidates, of which something is known here."""
        assert isinstance(self.scope.prices, Prices)
        prices.learn_from(self.scope.prices)
        return replace(self, scope=replace(self.scope, prices=prices))


class Helper:
    """The process, as the search sees it. ``away``: what it has, by name."""

    def __init__(self) -> None:
        """It starts, and waits for :meth:`begin`. Raises OSError where no process can be started."""
        self._process = start_process("planner.search.helper", "serve", heard=False)
        self.away: dict[int, Kin | Attempt] = {}
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | KnownAxis | None] = queue.SimpleQueue()
        self._sent, self._step_s, self._asked = 0, math.inf, False
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def bound(self, space: Space) -> None:
        """Have candidates placed and bounded, until :meth:`begin`."""
        self._orders.put(pickle.dumps(space))

    def take(self, axis: TensorAxis) -> None:
        """Say which tensor axis is done here."""
        self._orders.put(pickle.dumps(Taken(axis)))

    def bounded(self, *, wait: bool) -> KnownAxis | None:
        """What was done next, which is waited for or not; None where nothing is known, or the process has ended."""
        try:
            found = self._answers.get() if wait else self._answers.get_nowait()
        except queue.Empty:
            return None
        if not isinstance(found, KnownAxis):
            self._answers.put(found)  # It has ended: whoever asks next is told.
            return None
        return found

    def begin(self, best: Best, scope: Scope, deadline: float) -> None:
        """Say what the search is about, as it is now. Raises pickle.PicklingError and its like where that cannot be sent."""
        # What is known of families is found out again sooner than sent.
        known = replace(scope, pool={}, roughs={}, families={})
        self._orders.put(pickle.dumps(Begin(best.look, best.gap, best.most_s, known, deadline)))

    @property
    def least_s(self) -> float:
        """The lowest bound of what it has."""
        return min((node.bound for node in self.away.values()), default=math.inf)

    def attempts(self, target_s: float) -> int:
        """So many of what it has are attempts that may be quicker than the target: it looks at no others."""
        return sum(isinstance(node, Attempt) and node.bound < target_s for node in self.away.values())

    def begun(self, target_s: float) -> int:
        """So many of these have been looked at."""
        return sum(isinstance(node, Attempt) and node.looks > 0 and node.bound < target_s for node in self.away.values())

    def send(self, nodes: Sequence[Kin | Attempt], step_s: float) -> None:
        """Have nodes looked at."""
        fresh = []
        for name, node in enumerate(nodes, self._sent):
            self.away[name] = node
            fresh.append(Fresh.of(name, node))
        self._sent += len(fresh)
        self._order(Order(step_s, tuple(fresh)))

    def tell(self, step_s: float) -> None:
        """Say how quick the best plan is."""
        if step_s < self._step_s:
            self._order(Order(step_s))

    def back(self, target_s: float) -> Attempt | None:
        """An attempt that it has and does not look at now: of those with the fewest looks so far, which begin anew here, that
        of the highest bound below the target."""
        ranked = sorted((node.bound, name) for name, node in self.away.items() if node.bound < target_s)
        for looks in range(WORTH_AGAIN + 1):
            for _, name in reversed(ranked[1:]):
                node = self.away[name]
                if isinstance(node, Attempt) and node.looks == looks:
                    self._order(Order(self._step_s, dropped=name))
                    del self.away[name]
                    return node
        return None

    def ask(self) -> None:
        """Have something given back, as soon as it has something; asked for until it is there."""
        if not self._asked:
            self._asked = True
            self._order(Order(self._step_s, asks=True))

    def answer(self, wait_s: float = 0.0) -> tuple[Kin | Attempt | None, Answer] | None:
        """What was found next, and of which node (none where it came back meanwhile); None while nothing is known. Raises
        ProcessLookupError where the process has ended."""
        try:
            found = self._answers.get(timeout=wait_s) if wait_s > 0 else self._answers.get_nowait()
            while isinstance(found, KnownAxis):  # too late
                found = self._answers.get_nowait()
        except queue.Empty:
            return None
        if found is None:
            raise ProcessLookupError
        ended = found.finished or found.mixed
        self._asked = self._asked and found.given is None
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


_ahead: list[Helper] = []
"""A process that was started before its search."""


@contextmanager
def ahead() -> Iterator[None]:
    """Start a process for the next search, while there is something else to do before it."""
    with suppress(OSError):
        _ahead.append(Helper())
    try:
        yield
    finally:
        while _ahead:
            _ahead.pop().close()


def waits() -> bool:
    """Whether a process was started ahead."""
    return bool(_ahead)


def started() -> Helper:
    """The process that was started ahead, or a new one. Raises OSError where none can be started."""
    return _ahead.pop() if _ahead else Helper()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Do what is ordered until there are no more orders. Whoever gives them also hears of interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, orders), daemon=True).start()
    with only_new_collected():
        _follow(orders, sink)


def _follow(orders: queue.SimpleQueue[Any], sink: BinaryIO) -> None:
    """Place and bound, then look at nodes, and tell of each."""
    def tell(answer: Answer | KnownAxis) -> None:
        pickle.dump(answer, sink)
        sink.flush()

    axes, left = None, list[TensorAxis]()
    while True:
        while axes is not None and left and orders.empty():
            tell(axes.find(left.pop()))
        order = orders.get()
        if isinstance(order, Space):
            candidates = candidates_of(order.graph, order.cluster, order.request)
            axes = TensorAxes(Prices(order.graph, order.cluster, order.request, candidates.kinds), candidates)
            left = axes.each
        elif isinstance(order, Taken):
            left = [axis for axis in left if axis != order.axis]
        elif isinstance(order, Begin):
            return _look(order if axes is None else order.beside(axes.prices), orders, tell)
        else:
            return


def _look(begin: Begin, orders: queue.SimpleQueue[Any], tell: Callable[[Answer], None]) -> None:
    """Look at nodes until there are no more orders."""
    best, waiting, begun = Best(begin.gap, begin.look, most_s=begin.most_s), dict[int, Fresh](), dict[int, Attempt]()
    asked = False
    while True:
        name = _next(waiting, begun, best, begin.deadline)
        while name is None or not orders.empty():
            order = orders.get()
            if order is None:
                return
            best.step_s = min(best.step_s, order.step_s)
            waiting.update((fresh.name, fresh) for fresh in order.fresh)
            if order.dropped is not None:
                waiting.pop(order.dropped, None)
                begun.pop(order.dropped, None)
            asked = asked or order.asks
            name = _next(waiting, begun, best, begin.deadline)
        node = waiting.pop(name).node(begin.scope) if name in waiting else begun[name]
        if isinstance(node, Kin):
            target_s = best.target()
            rough = math.isinf(target_s) and not node.rough
            node.count(begin.scope, target_s)
            bounds = tuple(sketch.bound for sketch in node.sketches)
            tell(Answer(name, min(bounds), finished=True, bounds=bounds, rough=rough))
            continue
        best.found, begun[name] = None, node
        finished = node.advance(best.target, begin.deadline, begin.gap, best.report)
        if finished or node.mixed:
            del begun[name]
        tell(Answer(name, node.bound, finished, node.mixed, best.found))
        given = _given(begun, best) if asked else None
        if given is not None:
            tell(given)
            asked = False


def _given(begun: dict[int, Attempt], best: Best) -> Answer | None:
    """An attempt to give back, not the one of the lowest bound; else half of the branches of that."""
    target_s = best.target()
    ranked = sorted((attempt.bound, name) for name, attempt in begun.items() if attempt.bound < target_s)
    for bound, name in reversed(ranked[1:]):
        if begun[name].movable:
            return Answer(name, bound, finished=True, given=Fresh.of(name, begun.pop(name)))
    for bound, name in ranked[:1]:
        part = begun[name].part(target_s)
        if part is not None:
            return Answer(name, bound, finished=False, given=Fresh.of(name, part))
    return None


def _next(waiting: dict[int, Fresh], begun: dict[int, Attempt], best: Best, deadline: float) -> int | None:
    """The node of the lowest bound below the target; none when the time is over."""
    nodes: list[tuple[float, int]] = [(fresh.bound, name) for name, fresh in waiting.items()]
    nodes += [(attempt.bound, name) for name, attempt in begun.items()]
    bound, name = min(nodes, default=(math.inf, -1))
    return name if bound < best.target() and time.perf_counter() < deadline else None


def _listen(source: BinaryIO, orders: queue.SimpleQueue[Any]) -> None:
    """Whoever orders may end within an order (killed, out of memory): then there are no more either."""
    try:
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            while True:
                orders.put(pickle.load(source))
    finally:
        orders.put(None)
