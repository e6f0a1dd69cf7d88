"""A second process that looks at attempts: the same answer with it, without it, and where it ends early."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from planner.evaluate import evaluate
from planner.ir.plan import Plan, Prediction
from planner.search import Request, SearchResult
from planner.search.helper import Answer, Helper
from planner.search.nodes import Attempt
from planner.search.request import Look, as_it_is
from tests.search.made import make_cluster, make_costed, make_graph

searching: Any = importlib.import_module("planner.search.search")  # The package has a function of that name.
GRAPH = make_graph("abbbbbbbbc")
COSTED = make_costed(GRAPH, 3, zeros=(1,), levels=("none", "full"), crossing=5)
CLUSTER = make_cluster(4, 700)


def searched(look: Look = as_it_is, time_limit_s: float | None = None) -> SearchResult:
    request = Request(8, 4, "fp32", gap=1e-6, time_limit_s=time_limit_s)
    return searching.search(GRAPH, CLUSTER, request, costing=lambda _: COSTED, look=look)  # type: ignore[no-any-return]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What helpers answer, which are asked from the beginning on."""
    answers: list[Answer] = []
    answer = Helper.answer

    def listening(self: Helper, wait_s: float = 0.0) -> tuple[Attempt | None, Answer] | None:
        found = answer(self, wait_s)
        answers.extend([found[1]] if found is not None else [])
        return found

    monkeypatch.setattr(Helper, "answer", listening)
    monkeypatch.setattr(searching, "HELPED_AFTER_S", 0.0)
    monkeypatch.setattr(searching, "usable_cores", lambda: 2)
    return answers


@pytest.fixture
def alone_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """The best step, as one process finds it."""
    with monkeypatch.context() as patch:
        patch.setattr(searching, "usable_cores", lambda: 1)
        patch.setattr(searching, "HELPED_AFTER_S", 0.0)
        patch.setattr(searching, "Helper", None)
        result = searched()
    assert result.optimality_gap <= 1.001e-6
    return result.prediction.step_s


def check(result: SearchResult, step_s: float) -> None:
    assert result.optimality_gap <= 1.001e-6
    assert result.prediction.step_s == pytest.approx(step_s, rel=1e-6)
    assert evaluate(result.plan, COSTED, CLUSTER) == result.prediction


@pytest.fixture
def elsewhere(alone_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found here, and no attempt looked at, while there is a helper."""
    monkeypatch.setattr(Attempt, "probe", lambda *_: None)
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

    def once(self: Helper, attempt: Attempt, step_s: float) -> None:
        send(self, attempt, step_s)
        sent.append(attempt)
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

    def forgetting(self: Helper, wait_s: float = 0.0) -> tuple[Attempt | None, Answer] | None:
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
    away: list[Attempt] = []
    send = Helper.send

    def kept(self: Helper, attempt: Attempt, step_s: float) -> None:
        send(self, attempt, step_s)
        away.append(attempt)

    monkeypatch.setattr(Helper, "send", kept)
    monkeypatch.setattr(Helper, "answer", lambda *_: None)
    monkeypatch.setattr(Helper, "back", lambda *_: None)
    monkeypatch.setattr(searching._State, "_begun", lambda *_: 10**9)
    result = searched(time_limit_s=1.0)
    assert away and not heard
    assert result.lower_bound_s <= min(attempt.bound for attempt in away) < alone_s


def test_a_look_that_cannot_be_sent(heard: list[Answer], alone_s: float) -> None:
    seen: list[Plan] = []

    def look(plan: Plan, prediction: Prediction) -> Prediction:
        seen.append(plan)
        return prediction

    check(searched(look), alone_s)
    assert seen and not heard


@pytest.mark.usefixtures("elsewhere")
def test_no_process_is_left(heard: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    helpers: list[Helper] = []
    begin = Helper.__init__

    def noted(self: Helper, look: Look, gap: float, deadline: float) -> None:
        begin(self, look, gap, deadline)
        helpers.append(self)

    monkeypatch.setattr(Helper, "__init__", noted)
    searched()
    assert len(helpers) == 1 and helpers[0]._process.poll() is not None
