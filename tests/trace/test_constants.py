"""Tables that are too short for the positions that are looked up in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.table, self.head = nn.Embedding(12, 8), nn.Embedding(4, 8), nn.Linear(8, 12)
    def forward(self, input_ids):
        return self.head(self.tokens(input_ids) + self.table({index}))

def make():
    return Net()
"""


def test_positions_that_the_text_counts(model_file: Callable[[str], str]) -> None:
    spec = model_file(NET.format(index="(input_ids != 0).cumsum(1)"))
    assert trace_model(load_model(spec, {}, 3), dtype="float32").sequence == 3
    with pytest.raises(ModelError, match=r"position 5 is looked up in table\.weight, which has 4 rows; give --seq 3 or less"):
        trace_model(load_model(spec, {}, 5), dtype="float32")


@pytest.mark.parametrize("index", ["(input_ids == 11).cumsum(1)", "input_ids % 4", "(input_ids != 10).int()"])
def test_what_the_text_decides_is_taken(model_file: Callable[[str], str], index: str) -> None:
    """Segments may be few: a text of separators alone is none."""
    assert trace_model(load_model(model_file(NET.format(index=index)), {}, 9), dtype="float32").sequence == 9
