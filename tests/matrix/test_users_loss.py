"""A model without tokens, with a loss of its own: the program's loss and gradients are the plain model's, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.trace import load_model, trace_model
from runtime.data import BatchInput, make_batches
from tests.matrix import regression
from tests.matrix.build import Row
from tests.matrix.programs import emitted, losses
from tests.matrix.reference import SEED, worst_gradient
from tests.matrix.workers import Workers
from tests.wide import wide

Loss = Callable[[Any, dict[str, Tensor]], Tensor]
pytestmark = pytest.mark.slow
ROWS = [
    Row(accumulation=2, microbatch=3), Row(data=2, zero=3, microbatch=3),
    Row(tensor=2, pipeline=2, accumulation=2, microbatch=3, schedule="gpipe"),
]
LOSSES = [
    (regression.regression, regression.loss), (regression.regression, regression.two_averages),
    (regression.regression, regression.overlap), (regression.weighed_regression, regression.weighed),
    (regression.regression, regression.several), (regression.weighed_regression, regression.stacked),
    (regression.regression, regression.by_class), (regression.classifier, regression.weighed_classes),
    (regression.regression, regression.quotients),
]
CASES = [
    *((ROWS[0], *loss) for loss in LOSSES[:1]), *((ROWS[1], *loss) for loss in LOSSES[1:]),
    *((ROWS[2], *loss) for loss in (LOSSES[0], *LOSSES[3:])),
]
"""Each loss over data ranks or in one process; the plainest and those of more than sums over all other axes too."""


@pytest.mark.parametrize(("row", "model", "loss"), [
    case if case in CASES else wide(*case) for case in ((row, *loss) for row in ROWS for loss in LOSSES)
], ids=lambda item: item.label if isinstance(item, Row) else item.__name__)
def test_the_loss_and_every_gradient_are_the_plain_models(
    workers: Workers, row: Row, model: Callable[[], nn.Module], loss: Loss, tmp_path: Path
) -> None:
    source = replace(load_model(f"{regression.__file__}:{model.__name__}", {}, None), loss=loss)
    program = emitted(trace_model(source, dtype="float64"), row, tmp_path / "program")
    files = tmp_path / "start.pt", tmp_path / "gradients.pt"
    reports = program.train(workers, 1, "--export-start", str(files[0]), "--dump-gradients", str(files[1]))
    plain = model().double()
    plain.load_state_dict(torch.load(files[0]))
    inputs = [
        BatchInput(name, (12, width), torch.float64, "other", 0) for name, width in (("features", 30), ("target", 18))
    ]
    batch = make_batches(inputs, None, SEED, 6, 0, 1, torch.device("cpu")).at(0)
    expected = loss(plain(batch["features"]), batch)
    expected.backward()
    assert losses(reports) == pytest.approx([expected.item()], rel=1e-12)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    name, error = worst_gradient(torch.load(files[1]), gradients)
    assert error <= 1, f"{name}: {error}"
