"""``as_strided`` reads what it reads in the model, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from tests.trace.test_trace import both

NET = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.f = nn.Embedding(48, 16), nn.Linear(16, 16)
    def forward(self, input_ids):
        x = self.f(self.e(input_ids))
        B = len(x)
        x = x + {read}
        return x @ self.e.weight.T
def make():
    return M()
"""
COPIED = "x.transpose(1, 2).clone(memory_format=torch.contiguous_format)"


@pytest.mark.parametrize("read", [
    f"{COPIED}.as_strided((B, 15, 2, 16), (256, 16, 16, 1)).mean((1, 2))[:, None]",
    "x.as_strided((B, 8, 16), (256, 16, 1), 128).repeat(1, 2, 1)",
    "x.flatten(0, 1).as_strided((16 * B, 1), (16, 1)).view(B, 16, 1)",
])
def test_windows_of_a_sample(model_file: Callable[[str], str], read: str) -> None:
    """Whatever made the tensor lie row by row, which is left out elsewhere."""
    assert both(load_model(model_file(NET.format(read=read)), {}, None))[1] < 1e-12


@pytest.mark.parametrize(("read", "said"), [
    ("x.transpose(1, 2).as_strided((B, 16, 16), (256, 16, 1))", "does not lie row by row, or beyond it"),
    ("x.as_strided((B, 16, 16), (0, 16, 1))", "reads more than one sample, or one of them for all"),
    ("x.as_strided((16, B, 16), (16, 256, 1)).transpose(0, 1)", "reads more than one sample"),
    ("x.as_strided((B, 16, 16), (256, 16, 1), 1)", "does not lie row by row, or beyond it"),
])
def test_what_is_refused(model_file: Callable[[str], str], read: str, said: str) -> None:
    with pytest.raises(ModelError, match=rf"user_model.py:12: as_strided .*{said}"):
        trace_model(load_model(model_file(NET.format(read=read)), {}, None), sequence=16, dtype="float64")
