"""Pins: what is wrong is named with what is allowed."""

from __future__ import annotations

import pytest

from planner.ir.errors import NoPlanFits, PinError
from planner.search import Pins, Request, parse_pins, search
from tests.search.made import make_cluster, make_costed, make_graph


def test_pins_are_read() -> None:
    assert parse_pins(["tensor=8", "schedule=1f1b", "sequence_parallel=true", "zero=0"]) == Pins(
        tensor=8, schedule="1f1b", sequence_parallel=True, zero=0
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tensor"], "write K=V"), (["colour=3"], "K one of pipeline"), (["tensor=0"], "positive number"),
        (["tensor=²"], "positive number"), (["zero=4"], "one of 0, 1, 2, 3"), (["schedule=fast"], "one of gpipe"),
        (["recompute=some"], "one of none"),
        (["sequence_parallel=maybe"], "true or"), (["tensor=2", "tensor=4"], "both 2 and 4"),
        (["context=2"], "not supported yet"), (["schedule=zbv", "zero=3"], "zero=0, 1 or 2"),
        (["schedule=gpipe", "virtual=2"], "one stage"),
        (["pipeline=1", "virtual=2"], "virtual=1"), (["data=4", "zero_group=3"], "divisor"),
    ],
)
def test_wrong_pins_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(PinError, match=message):
        parse_pins(texts)


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["pipeline=3"], "one of"), (["data=4", "tensor=4"], "no mesh"), (["pipeline=8"], "blocks"),
     (["pipeline=2", "data=2", "tensor=1"], "= 4, not the 8")],
)
def test_impossible_pins_are_named(texts: list[str], message: str) -> None:
    graph = make_graph("aaaa")
    with pytest.raises(PinError, match=message):
        search(graph, make_cluster(8, 1000), Request(8, 4, "fp32", parse_pins(texts)), costing=lambda _: None)


def test_what_does_not_fit_is_explained() -> None:
    graph = make_graph("aaaa")
    costed = make_costed(graph, 0)
    pins = parse_pins(["tensor=1", "microbatch=1", "recompute=none"])
    with pytest.raises(NoPlanFits, match=r"rank of stage .* bytes too few"):
        search(graph, make_cluster(2, 60), Request(4, 4, "fp32", pins), costing=lambda _: costed)
