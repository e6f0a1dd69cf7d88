"""What numpy's and Python's generators draw in forward, and what a trace would keep of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from planner.trace.generators import ALIKE_DRAWS, foreign_state, other_draws, seeded

MODEL = """
import random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            {line}
            x = x + layer(x)
        return self.head(x)

def make():
    return Net()
"""


def traced(tmp_path: Path, line: str) -> tuple[str, ...]:
    """The names of the blocks of a model with that line before each layer."""
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("{line}", line))
    graph = trace_model(load_model(f"{path}:make", {}, None), sequence=6, dtype="float32")
    return tuple(block.name for block in graph.blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "what"), [
    ("if random.random() < 0.01: continue", ":17: the operand of linear is computed from"),
    ("if np.random.rand() > 0.99: x = 2 * x", ":16: which operations run depends on"),
    ("if random.uniform(0, 1) < 1e-6: x = x + 1", ":16: which operations run depends on"),
    ("x = x * random.gauss(1, 0.1)", "in mul is computed from"),
    ("x = x[..., torch.tensor(np.random.permutation(8))]", ":16: the number 6 in tensor is computed from"),
])
def test_a_draw_that_changes_the_step_is_refused_by_its_line(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(ModelError) as refused:
        traced(tmp_path, line)
    said = str(refused.value)
    assert what in said and "what numpy or Python draws at random; a program would" in said


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "random.random()",
    "if np.random.random() < 0.0: continue",
    "while np.random.uniform(size=2).max() > 0.5: pass",
    "np.random.seed(3); x = x * float(np.random.rand())",
])
def test_a_draw_that_changes_nothing_is_no_matter(tmp_path: Path, line: str) -> None:
    assert traced(tmp_path, line) == traced(tmp_path, "pass")


def test_other_draws_are_other_draws() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.uniform(2, 4), np.random.rand(), *np.random.uniform(2, 4, size=2)]

    before = foreign_state()
    with seeded():
        first = drawn()
    for draws in other_draws():
        with draws:
            assert not set(drawn()) & set(first)
    _, lowest, highest = other_draws()
    with lowest:
        assert drawn() == [0, 2, 0, 2, 2]
        assert max(random.random() for _ in range(2 * ALIKE_DRAWS)) > 0.9
    with highest:
        assert np.allclose(drawn(), [1, 4, 1, 4, 4]) and random.random() < 1
    assert foreign_state() == before
