"""Where highspy is missing, PuLP and CBC find the same optimum from the same rows."""

from __future__ import annotations

import sys

import pytest

from planner.constraints_text import parse_pins
from planner.ir.plan import ScheduleName
from planner.search import Request, search
from tests.search.made import make_cluster, make_costed, make_graph


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_cbc_finds_the_same_optimum(schedule: ScheduleName, virtual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = make_graph(list("eaab")), make_cluster(2, 900)
    costed = make_costed(graph, 3, crossing=4)
    pins = parse_pins(["pipeline=2", f"schedule={schedule}", "tensor=1", f"virtual={virtual}", "microbatch=1"])
    request = Request(4, 4, "fp32", pins, gap=1e-4)
    with_highs = search(graph, cluster, request, costing=lambda _: costed)
    monkeypatch.setitem(sys.modules, "highspy", None)
    without = search(graph, cluster, request, costing=lambda _: costed)
    assert without.prediction.step_s == pytest.approx(with_highs.prediction.step_s, rel=2e-4)
    assert without.optimality_gap <= 1e-3
    assert without.lower_bound_s <= with_highs.prediction.step_s * (1 + 1e-6)
