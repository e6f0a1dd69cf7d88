"""What a search under way says of itself holds then, and for its end."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from planner.search import Request
from tests.search.made import make_cluster, make_costed, make_graph

searching: Any = importlib.import_module("planner.search.search")  # The package has a function of that name.
GRAPH = make_graph("abbbbbbbbc")
COSTED = make_costed(GRAPH, 3, zeros=(1,), levels=("none", "full"), crossing=5)


@pytest.mark.slow
def test_news_are_steps_and_gaps_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "NEWS_S", 0.0)
    monkeypatch.setattr(searching, "HELPED_AFTER_S", 1e9)
    heard: list[tuple[float, float]] = []
    result = searching.search(
        GRAPH, make_cluster(4, 700), Request(8, 4, "fp32", gap=1e-6), costing=lambda _: COSTED,
        news=lambda step_s, gap: heard.append((step_s, gap)),
    )
    best_s = result.prediction.step_s
    assert len(heard) > 5
    steps, bounds = [step_s for step_s, _ in heard], [step_s * (1 - gap) for step_s, gap in heard]
    assert steps == sorted(steps, reverse=True) and steps[-1] == best_s
    assert all(bound <= best_s * (1 + 1e-9) for bound in bounds) and bounds[-1] > bounds[0]


@pytest.mark.slow
def test_no_news_of_a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "NEWS_S", 60.0)

    def heard(step_s: float, gap: float) -> None:
        raise AssertionError(step_s, gap)

    searching.search(GRAPH, make_cluster(4, 700), Request(8, 4, "fp32"), costing=lambda _: COSTED, news=heard)
