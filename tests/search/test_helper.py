"""A second process that looks at sketches and attempts: the same answer with it, without it, and where it ends early."""

from __future__ import annotations

import importlib
import math
import pickle
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner import compile as compiling
from planner.compile import compile_job
from planner.evaluate import evaluate
from planner.ir.errors import ModelError
from planner.ir.plan import Plan, Prediction
from planner.job import Job
from planner.search import Request, SearchResult, nodes
from planner.search import helper as helping
from planner.search.best import Best
from planner.search.branches import Branches, Opened
from planner.search.candidates import Candidate, candidates_of, enumerate_candidates
from planner.search.climb import Climb
from planner.search.families import Scope
from planner.search.helper import Answer, Begin, Fresh, Helper, Order, Space, ahead
from planner.search.nodes import Attempt, Kin, Sketch, count, count_roughly
from planner.search.placing import bounds_of
from planner.search.prices import Prices
from planner.search.request import Look, as_it_is
from planner.search.solve import Fingerprints
from planner.search.tensor_axes import KnownAxis, TensorAxes
from planner.workers import start_process
from tests.costing.test_measured_memory import graph_of
from tests.search.made import Always, make_cluster, make_costed, make_graph

pytestmark = pytest.mark.slow

searching: Any = importlib.import_module("planner.search.search")  # The package has a function of that name.
GRAPH = make_graph("abbbbbbbbc")
COSTED = make_costed(GRAPH, 3, zeros=(1,), levels=("none", "full"), crossing=5)
CLUSTER = make_cluster(4, 700)


def searched(look: Look = as_it_is, time_limit_s: float | None = None) -> SearchResult:
    request = Request(8, 4, "fp32", gap=1e-6, time_limit_s=time_limit_s)
    return searching.search(GRAPH, CLUSTER, request, costing=Always(COSTED), look=look)  # type: ignore[no-any-return]


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[Helper]:
    """All that are started."""
    found: list[Helper] = []
    begin = Helper.__init__

    def noted(self: Helper) -> None:
        begin(self)
        found.append(self)

    monkeypatch.setattr(Helper, "__init__", noted)
    return found


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What helpers answer, which are asked from the beginning on."""
    answers: list[Answer] = []
    answer = Helper.answer

    def listening(self: Helper, wait_s: float = 0.0) -> tuple[Kin | Attempt | None, Answer] | None:
        found = answer(self, wait_s)
        answers.extend([found[1]] if found is not None else [])
        return found

    monkeypatch.setattr(Helper, "answer", listening)
    monkeypatch.setattr(searching, "HELPED_AFTER_S", 0.0)
    monkeypatch.setattr(searching, "usable_cores", lambda: 2)
    return answers


@pytest.fixture(scope="module")
def alone_s() -> float:
    """The best step, as one process finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "usable_cores", lambda: 1)
        patch.setattr(searching, "HELPED_AFTER_S", 0.0)
        patch.setattr(searching, "Helper", None)
        result = searched()
    assert result.optimality_gap <= 1e-6
    return result.prediction.step_s


def check(result: SearchResult, step_s: float) -> None:
    assert result.optimality_gap <= 1e-6
    assert result.prediction.step_s == pytest.approx(step_s, rel=1e-6)
    assert evaluate(result.plan, COSTED, CLUSTER) == result.prediction


@pytest.fixture
def elsewhere(alone_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found here, and no attempt looked at, while there is a helper."""
    monkeypatch.setattr(Attempt, "probe", lambda *_, **__: None)
    monkeypatch.setattr(searching._State, "_begun", lambda *_: 10**9)
    monkeypatch.setattr(Helper, "back", lambda *_: None)


@pytest.mark.usefixtures("elsewhere")
def test_a_helper_finds_what_one_finds_alone(heard: list[Answer], alone_s: float) -> None:
    check(searched(), alone_s)
    assert any(answer.finished for answer in heard)
    assert any(answer.plan is not None for answer in heard)


def test_two_find_what_one_finds(heard: list[Answer], alone_s: float) -> None:
    """Whoever is first."""
    check(searched(), alone_s)


@pytest.mark.usefixtures("elsewhere")
def test_what_it_had_begins_anew_where_it_ends(
    heard: list[Answer], monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    send, sent = Helper.send, []

    def once(self: Helper, nodes: Sequence[Kin | Attempt], step_s: float) -> None:
        send(self, nodes, step_s)
        sent.extend(nodes)
        self._process.kill()

    monkeypatch.setattr(Helper, "send", once)
    check(searched(), alone_s)
    assert sent and not heard


@pytest.mark.usefixtures("elsewhere")
def test_a_plan_of_an_attempt_that_came_back_is_kept(
    heard: list[Answer], monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    """It goes on from that plan, so what it says later holds for quicker ones only."""
    answer, forgotten = Helper.answer, []

    def forgetting(self: Helper, wait_s: float = 0.0) -> tuple[Kin | Attempt | None, Answer] | None:
        found = answer(self, wait_s)
        if found is None or found[1].plan is None:
            return found
        forgotten.append(found[0])
        return None, found[1]

    monkeypatch.setattr(Helper, "answer", forgetting)
    check(searched(), alone_s)
    assert forgotten


def test_what_it_still_has_when_time_is_over_is_not_proven(
    heard: list[Answer], monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    """It is given all attempts and never answers."""
    away: list[Kin | Attempt] = []
    send = Helper.send

    def kept(self: Helper, nodes: Sequence[Kin | Attempt], step_s: float) -> None:
        send(self, nodes, step_s)
        away.extend(nodes)

    monkeypatch.setattr(Helper, "send", kept)
    monkeypatch.setattr(Helper, "answer", lambda *_: None)
    monkeypatch.setattr(Helper, "back", lambda *_: None)
    monkeypatch.setattr(searching._State, "_begun", lambda *_: 10**9)
    result = searched(time_limit_s=4.0)
    assert away and not heard
    assert result.lower_bound_s <= min(node.bound for node in away) < alone_s


def test_a_look_that_cannot_be_sent(heard: list[Answer], alone_s: float) -> None:
    seen: list[Plan] = []

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        seen.append(plan)
        return prediction

    check(searched(look), alone_s)
    assert seen and not heard


@pytest.mark.usefixtures("elsewhere")
def test_no_process_is_left(heard: list[Answer], helpers: list[Helper]) -> None:
    searched()
    assert len(helpers) == 1 and helpers[0]._process.poll() is not None


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_it_ends_with_its_orders_however_they_end(part: float) -> None:
    """Whoever orders may be killed within an order: nobody is left to end the process."""
    order = pickle.dumps([list(range(1000))])
    with start_process("planner.search.helper", "serve", heard=False) as process:
        try:
            process.communicate(order[: round(part * len(order))], timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()


def test_it_counts_sketches_as_they_are_counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prices of its own, from the graph and the cluster that it was sent. Before there is any plan, roughly
    first."""
    graph, cluster = graph_of("gpt", "float32"), resolve_cluster("local-cpu:1x4")
    request = Request(16, graph.sequence, "fp32")
    monkeypatch.setattr(searching, "usable_cores", lambda: 2)
    monkeypatch.setattr(searching, "MANY", 1)
    taken: dict[bool, dict[Candidate, float]] = {True: {}, False: {}}
    take = searching._State._take

    def taking(self: Any, node: Kin | Attempt | None, answer: Answer) -> None:
        take(self, node, answer)
        if isinstance(node, Kin):
            taken[answer.rough].update((sketch.candidate, sketch.bound) for sketch in node.sketches)

    monkeypatch.setattr(searching._State, "_take", taking)
    # The climb waits until all are counted.
    monkeypatch.setattr(Climb, "begin", lambda self, deadline: _until(lambda: len(taken[False]) == possible, self.meanwhile))
    candidates = enumerate_candidates(graph, cluster, request)
    prices = Prices(graph, cluster, request, candidates)
    possible = sum(math.isfinite(prices.bound(candidate)) for candidate in candidates)
    searching.search(graph, cluster, request)
    scope = Scope(graph, prices, cluster, request, cast(Any, None))
    assert len(taken[True]) == len(taken[False]) == possible > 20
    for candidate in taken[True]:
        sketch = Sketch(candidate, prices.bound(candidate))
        count_roughly([sketch], scope)
        assert sketch.bound == taken[True][candidate], candidate
        count([sketch], scope)
        assert sketch.bound == taken[False][candidate], candidate


def _until(reached: Callable[[], bool], meanwhile: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not reached() and time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.01)


def axes_of(cluster: Cluster) -> TensorAxes:
    """Of a small model."""
    graph = graph_of("gpt", "float32")
    request = Request(16, graph.sequence, "fp32")
    candidates = candidates_of(graph, cluster, request)
    return TensorAxes(Prices(graph, cluster, request, candidates.kinds), candidates)


def space_of(axes: TensorAxes) -> Space:
    prices = axes.prices
    return Space(graph_of("gpt", "float32"), prices.cluster, prices.request)


def test_it_bounds_as_is_bounded_here() -> None:
    axes, other = (axes_of(resolve_cluster("local-cpu:2x4")) for _ in range(2))
    assert axes.each == [(1, 1), (2, 1), (4, 1), (8, 1)]
    helper = Helper()
    try:
        helper.bound(space_of(axes))
        helper.take((2, 1))
        found = [helper.bounded(wait=True) for _ in range(3)]
    finally:
        helper.close()
    assert [each.axis for each in found if each is not None] == [(8, 1), (4, 1), (1, 1)], "what is done here is left out there"
    for each in found:
        assert each is not None and each == axes.find(each.axis)
        other.learn(each)
    assert other.prices.options(8) == axes.prices.options(8) != ()


class _Bounding:
    """A helper that answers what it is told to: so many at every question, then nothing any more."""

    def __init__(self, axes: TensorAxes, answers: Sequence[int]) -> None:
        self.axes, self.answers, self.waited = axes, list(answers), False
        self.left, self.taken = axes.each, list[tuple[int, int]]()

    def take(self, axis: tuple[int, int]) -> None:
        self.taken.append(axis)

    def bounded(self, *, wait: bool) -> KnownAxis | None:
        self.waited |= wait
        if not wait and (not self.answers or not self.answers[0]):
            self.answers[:1] = []
            return None
        if self.answers:
            self.answers[0] -= 1
        return self.axes.find(self.left.pop())


@pytest.mark.parametrize(("answers", "here", "waited"), [
    ((), 4, False), ((0, 1), 2, True), ((1, 1), 1, True), ((4,), 0, True), ((0, 0, 0, 0), 4, False), ((0, 0, 1), 2, True),
    ((0, 0, 0, 1), 3, False),
])
def test_two_bound_everything_once(answers: tuple[int, ...], here: int, waited: bool) -> None:
    """Where it has not answered by then, the last is bounded here too; where it has, it is waited for. In the end there are
    bounds of all candidates, in their order."""
    known, axes = (axes_of(resolve_cluster("local-cpu:2x4")) for _ in range(2))
    helper = _Bounding(known, answers)
    found = bounds_of(axes, cast(Helper, helper))
    assert helper.taken == axes.each[:here] and helper.waited == waited
    prices = known.prices
    lessened = [prices.without_beaten(candidate) for kind in known.kinds for candidate in kind.candidates]
    assert list(found.items()) == [(candidate, prices.bound(candidate)) for candidate in lessened]


def test_a_search_goes_on_with_the_prices_that_bounded_it() -> None:
    """The helper's own, which know by then what was placed here."""
    axes, other = (axes_of(resolve_cluster("local-cpu:2x4")) for _ in range(2))
    axes.find((8, 1))
    other.find((2, 1))
    scope = Scope(graph_of("gpt", "float32"), axes.prices, axes.prices.cluster, axes.prices.request, cast(Any, None))
    begun = Begin(as_it_is, 0.001, math.inf, pickle.loads(pickle.dumps(scope)), math.inf).beside(other.prices)
    assert begun.scope.prices is other.prices
    known = {degree: other.prices.units(degree) for degree in (2, 4, 8)}
    placed = [degree for degree, units in known.items() if all(unit in other.prices._placed for unit in units)]
    assert placed == [2, 8]


def test_a_process_that_was_started_ahead_is_taken_or_ended() -> None:
    with ahead():
        taken = helping.started()
    assert taken._process.poll() is None
    taken.close()
    with ahead():
        (waiting,) = helping._ahead
        assert waiting._process.poll() is None
    assert waiting._process.poll() is not None and not helping._ahead


def test_a_job_that_fails_leaves_no_process(helpers: list[Helper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "usable_cores", lambda: 2)
    with pytest.raises(ModelError, match="nowhere"):
        compile_job(Job(model="nowhere.py:build", cluster="dgx-h100:8"), lambda words: None)
    assert len(helpers) == 1 and helpers[0]._process.poll() is not None


def _named(bounds: Sequence[tuple[float, int]], scope: Scope) -> list[Attempt]:
    """Attempts with these bounds and looks."""
    candidate = next(each for each in enumerate_candidates(GRAPH, CLUSTER, scope.request) if each.mesh.pipeline == 2)
    attempts, _ = Sketch(candidate, 0.0).attempts(scope)
    return [replace(attempts[0], bound=bound, looks=looks) for bound, looks in bounds]


@pytest.fixture
def scope() -> Scope:
    return Scope(GRAPH, Always(COSTED), CLUSTER, Request(8, 4, "fp32"), Fingerprints("model", "graph", "cluster", "cluster"))


def test_attempts_that_cannot_matter_do_not_keep_it_busy(scope: Scope) -> None:
    """It does not look at what is no quicker than the best plan: that is no reason to give it nothing else."""
    first, *_ = _named([(0.0, 0)], scope)
    helper = Helper()
    try:
        helper.away = dict(enumerate(_named([(first.bound * by, 0) for by in (2, 3, 4)], scope)))
        assert helper.attempts(math.inf) == 3
        assert helper.attempts(first.bound * 3) == 1 and helper.attempts(first.bound * 2) == 0
    finally:
        helper.close()


def test_what_comes_back_had_few_looks(scope: Scope) -> None:
    """What it has not looked at first, then the fewest looks; not what it looks at now, nor what it has looked at for long."""
    first, *_ = _named([(0.0, 0)], scope)
    helper = Helper()
    try:
        bounds = [(2, 0), (3, 0), (4, 1), (5, 2), (6, 1), (7, 3), (8, 0), (9, 0)]
        helper.away = dict(enumerate(_named([(first.bound * by, looks) for by, looks in bounds], scope)))
        found = [helper.back(first.bound * 8.5) for _ in range(6)]
    finally:
        helper.close()
    times = [None if each is None else (round(each.bound / first.bound), each.looks) for each in found]
    assert times == [(8, 0), (3, 0), (6, 1), (4, 1), (5, 2), None]


def test_what_was_finished_before_it_moved_counts(scope: Scope) -> None:
    """A bound of what is left alone would be one of the whole."""
    (attempt,) = _named([(1.0, 1)], scope)
    attempt.branches = Branches(attempt.counts)
    attempt.branches.finished_s = 2.5
    moved = Fresh.of(3, attempt).node(scope)
    assert isinstance(moved, Attempt) and moved.branches is not None
    assert moved.branches.finished_s == 2.5 and moved.branches.opened == attempt.branches.opened
    assert moved.branches.bound == attempt.branches.bound <= 2.5


def _told(
    scope: Scope, monkeypatch: pytest.MonkeyPatch, bounds: Sequence[float], target_s: float = math.inf
) -> list[Answer]:
    """What is told of attempts with these bounds, of which each has two open branches and no look finds anything, and of which
    something is to be given back."""
    def looking(self: Attempt, *rest: Any) -> bool:
        boxes = ((((False, 3), (0.0, 1.0)),), (((False, 3), (2.0, 9.0)),))
        self.branches = self.branches or Branches(self.counts, [Opened(self.bound, box, None) for box in boxes])
        self.bound += 0.5
        return False

    monkeypatch.setattr(Attempt, "advance", looking)
    attempts = _named([(bound, 0) for bound in bounds], scope)
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    orders.put(Order(target_s, tuple(Fresh.of(name, attempt) for name, attempt in enumerate(attempts))))
    told: list[Answer] = []

    def tell(answer: Answer) -> None:
        told.append(answer)
        if len(told) == len(bounds):
            orders.put(Order(target_s, asks=True))
        if answer.given is not None:
            orders.put(None)

    helping._look(Begin(as_it_is, 0.0, math.inf, scope, math.inf), orders, tell)
    return told


def test_what_is_asked_for_is_not_what_is_looked_at_next(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two attempts under way the one of the highest bound, as a whole: it is had no more. (The first is looked at again
    before that, and has that bound then.)"""
    first, *_ = _named([(0.0, 0)], scope)
    *looks, answer = _told(scope, monkeypatch, [first.bound + 0.1, first.bound + 0.2])
    assert [look.name for look in looks] == [0, 1, 0] and answer.name == 0 and answer.finished
    assert answer.given is not None and answer.given.bound == answer.bound == pytest.approx(first.bound + 1.1)
    assert len(answer.given.opened) == 2


def test_of_a_single_attempt_a_part_is_given(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is had still."""
    first, *_ = _named([(0.0, 0)], scope)
    *looks, answer = _told(scope, monkeypatch, [first.bound + 0.1])
    assert not any(look.given for look in looks) and answer.name == 0 and not answer.finished
    assert answer.given is not None and len(answer.given.opened) == 1


def test_what_is_given_back_is_open_until_it_is_seen_to(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    """No certificate leaves it out, whenever the time is over; it is asked for again only when it is there."""
    first, *_ = _named([(0.0, 0)], scope)
    *_, answer = _told(scope, monkeypatch, [first.bound + 0.1, first.bound + 0.2])
    state, helper = searching._State(Best(0.001, as_it_is)), Helper()
    try:
        state.helper, helper.away = helper, dict(enumerate(_named([(first.bound + by, 1) for by in (0.9, 2.0)], scope)))
        helper.ask()
        assert helper._asked
        helper._answers.put(answer)
        state.hear()
        assert not helper._asked and list(helper.away) == [1]
        assert state.least_s == state.lower_s == answer.bound
    finally:
        helper.close()


def test_attempts_under_way_are_gone_on_with_there(
    heard: list[Answer], monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    """The first look here finds nothing, so that all attempts stay open; none is sent before that."""
    advance = Attempt.advance

    def later(self: Attempt, *rest: Any) -> bool:
        self.looks += 1
        return self.looks > 1 and advance(self, *rest)

    monkeypatch.setattr(Attempt, "advance", later)
    monkeypatch.setattr(Attempt, "movable", property(lambda self: self.looks > 0))
    monkeypatch.setattr(Attempt, "part", lambda *_: None)
    monkeypatch.setattr(Helper, "back", lambda *_: None)
    # There is always enough there that nobody has looked at, and never as many under way as here.
    monkeypatch.setattr(Helper, "attempts", lambda *_: 10**9)
    monkeypatch.setattr(searching._State, "_begun", lambda *_: 10**8)
    looks: list[int] = []
    send = Helper.send

    def noted(self: Helper, nodes: Sequence[Kin | Attempt], step_s: float) -> None:
        looks.extend(node.looks for node in nodes if isinstance(node, Attempt))
        send(self, nodes, step_s)

    monkeypatch.setattr(Helper, "send", noted)
    check(searched(), alone_s)
    assert looks and min(looks) > 0
    assert any(answer.finished for answer in heard)


def test_open_branches_are_looked_at_there(heard: list[Answer], monkeypatch: pytest.MonkeyPatch, alone_s: float) -> None:
    """Looks end at once and nothing is told apart here, so that attempts stay open and are parted."""
    monkeypatch.setattr(nodes, "FIRST_SLICE_S", 0.001)
    monkeypatch.setattr(nodes, "SOON_S", 0.0)
    monkeypatch.setattr(Branches, "_told_apart", lambda *_: False)
    monkeypatch.setattr(searching, "SHARED", 10**9)
    monkeypatch.setattr(searching._State, "_share", lambda *_: None)
    monkeypatch.setattr(searching._State, "_unopened", lambda *_: None)
    parts: list[Attempt] = []
    part = Attempt.part

    def noted(self: Attempt, target_s: float) -> Attempt | None:
        found = part(self, target_s)
        parts.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(Attempt, "part", noted)
    check(searched(), alone_s)
    assert parts and not any(attempt.whole for attempt in parts)
    assert any(answer.finished for answer in heard)
