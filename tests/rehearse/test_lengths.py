"""A few micro-batches tell the whole step: the ledger drawn from short steps is the ledger of all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import emit
from planner.ledger import RankLedger
from runtime.rehearsal_length import lengths, nearest, on_line
from tests.costing.test_ledger_memory import graph_of
from tests.matrix.build import Row, label, make_plan
from tests.rehearse.programs import written
from tests.rehearse.server import Server
from tests.wide import wide

# Two or three micro-batches (or a round) beyond the two lengths that draw the line: what is on it there is on it further on.
ROWS = [
    ("gpt", Row(accumulation=6, data=2, zero=3, recompute="full")),
    wide("llama", Row(accumulation=6, data=2, tensor=2, zero=2, sequence_parallel=True, recompute="selective")),
    wide("gpt", Row(accumulation=7, zero=0)),
    wide("gpt", Row(pipeline=4, accumulation=8, data=2, zero=1)),
    wide("llama", Row(pipeline=2, accumulation=6, data=2, zero=3, recompute="mixed")),
    wide("gpt", Row(pipeline=2, accumulation=6, data=2, zero=2, schedule="gpipe")),
    wide("gpt", Row(pipeline=2, accumulation=10, data=2, zero=1, schedule="interleaved-1f1b")),
    ("gpt", Row(pipeline=2, accumulation=10, data=2, zero=3, schedule="interleaved-1f1b")),
    wide("gpt", Row(pipeline=2, accumulation=10, data=2, zero=2, schedule="interleaved-zero-bubble")),
    wide("gpt", Row(pipeline=2, accumulation=10, data=2, zero=1, schedule="zbv")),
    ("gpt", Row(pipeline=2, accumulation=9, microbatch=2, schedule="zbv")),
]


def _followed_apart(ledgers: Sequence[RankLedger]) -> list[RankLedger]:
    """Without what an allocator has reserved by then: it remembers earlier steps."""
    return [replace(ledger, reserved_bytes=None) for ledger in ledgers]


MOVES = Row(pipeline=4, tensor=2, sequence_parallel=True, schedule="gpipe", accumulation=8)
"""Of short steps the last reduction holds the most, of the whole one the activations of all micro-batches."""


def test_short_steps_are_run_whole() -> None:
    assert lengths("1f1b", 4, 6) == (6,)
    assert lengths("1f1b", 1, 1) == (1,)
    assert lengths("interleaved-1f1b", 2, 8) == (8,)


def test_lengths_keep_the_rounds_of_interleaving() -> None:
    assert lengths("interleaved-1f1b", 4, 24) == (12, 16)
    assert lengths("1f1b", 8, 96) == (9, 10)


def test_of_moments_that_hold_equally_much_the_same_one_is_drawn() -> None:
    first, second = [{"a": 10, "b": 5}], [{"a": 14, "b": 2}, {"a": 10, "b": 6}]
    assert nearest([first, second]) == ({"a": 10, "b": 5}, {"a": 10, "b": 6})
    assert list(nearest([second])) == second[:1]


def test_what_is_on_no_line_is_refused() -> None:
    assert on_line((3, 4), [{"a": 1}, {"a": 2}], 10) == {"a": 8}
    assert on_line((3, 4), [{}, {"a": 1}], 10) == {"a": 7}
    assert on_line((4, 6), [{"a": 4}, {"a": 7}], 10) is None
    assert on_line((10,), [{"a": 5}], 10) == {"a": 5}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "row"), ROWS, ids=label)
def test_the_line_is_the_whole_step(server: Server, model: str, row: Row, tmp_path: Path) -> None:
    plan, _ = written(model, row, tmp_path / "program")
    assert lengths(row.schedule, row.pipeline, row.accumulation)[-1] < row.accumulation
    ranks = [0, plan.mesh.devices - 1]
    found = server.rehearse(tmp_path / "program", ranks, ways=(False, True))
    assert _followed_apart(found[::2]) == _followed_apart(found[1::2])


@pytest.mark.slow
def test_a_peak_that_moves_is_followed(server: Server, tmp_path: Path) -> None:
    graph = graph_of("corners", "bf16")
    plan = make_plan(graph, MOVES, precision="bf16")
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="format: 1\n")
    found = server.rehearse(tmp_path / "program", [0, 2, 4, 6], ways=(False, True))
    assert _followed_apart(found[::2]) == _followed_apart(found[1::2])
