"""Sections of a model in which nothing repeats, and values that a stage hands on and reads. Float64 on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.trace import load_model, trace_model
from tests.matrix.build import Row
from tests.matrix.programs import emitted, losses
from tests.matrix.reference import worst_gradient
from tests.matrix.workers import Workers
from tests.trace.test_sections import UNLIKE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "row"), [
    ("pyramid", Row(data=2, tensor=2, accumulation=2, microbatch=2)),
    ("pyramid", Row(data=2, pipeline=2, accumulation=2, microbatch=2, schedule="zbv")),
    # A stage's second output is made of its first one.
    ("widening", Row(data=2, pipeline=2, accumulation=2, microbatch=2, schedule="zbv")),
], ids=str)
def test_gradients_do_not_depend_on_the_plan(workers: Workers, name: str, row: Row, tmp_path: Path) -> None:
    graph = trace_model(load_model(f"{UNLIKE}:make", {"name": name}, None), dtype="float64")
    found = []
    for each in (Row(data=2, accumulation=2, microbatch=2), row):
        program, gradients = emitted(graph, each, tmp_path / each.label), tmp_path / f"{each.label}.pt"
        found.append((losses(program.train(workers, 2, "--dump-gradients", str(gradients))), torch.load(gradients)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    assert worst_gradient(found[1][1], found[0][1])[1] <= 1
