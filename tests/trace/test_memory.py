"""Parameters that share memory are refused, unless they are one, or have no number in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.ir.errors import ModelError
from planner.trace import load_model
from planner.trace.build import build
from planner.trace.memory import _apart

NET = """
class M(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.a, self.b = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        {line}
def make():
    return M({size})
"""
BOTH, ASSIGN = "parameters a.weight and b.weight lie in the same memory", "assign the same Parameter"
BUFFER = "buffer w lies in the memory of parameter a.weight"


@pytest.mark.parametrize("size", ["", "2048"])  # of numbers, and fake
@pytest.mark.parametrize(("line", "said"), [
    ("self.b.weight = nn.Parameter(self.a.weight)", BOTH), ("self.b.weight.data = self.a.weight.data", BOTH),
    ("self.b.weight = nn.Parameter(self.a.weight.t())", BOTH), ("self.b.weight = nn.Parameter(self.a.weight[1:])", BOTH),
    ("self.register_buffer('w', self.a.weight.detach())", BUFFER),
    ("self.register_buffer('w', self.a.weight.data[0])", BUFFER),
])
def test_one_memory(model_file: Callable[[str], str], line: str, said: str, size: str) -> None:
    source = load_model(model_file(NET.format(line=line, size=size)), {}, None)
    with pytest.raises(ModelError, match=said) as error:
        build(source, "float32")
    assert (ASSIGN in str(error.value)) == (said is BOTH)


@pytest.mark.parametrize("line", [
    "self.b.weight = self.a.weight", "self.b.weight = nn.Parameter(self.a.weight.detach().clone())",
    "self.c, self.d = map(nn.Parameter, torch.randn(8, 4).chunk(2))",
    "self.c, self.d = map(nn.Parameter, torch.randn(8, 4).chunk(2, 1))",
    "self.c, self.d = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))",
    "nn.utils.parametrizations.weight_norm(self.a); nn.utils.weight_norm(self.b)",
    "nn.utils.parametrize.register_parametrization(self.a, 'weight', nn.Identity())",
    "nn.utils.spectral_norm(self.a); nn.utils.parametrizations.spectral_norm(self.b)",
    "from torch.nn.utils import prune; prune.l1_unstructured(self.a, 'weight', 0.5)",
    "self.c, self.d = nn.LSTM(4, 4, 2), nn.MultiheadAttention(16, 2)",
    "self.register_buffer('w', torch.ones(4)); self.register_buffer('v', self.w[:2])",
])
def test_memory_of_their_own(model_file: Callable[[str], str], line: str) -> None:
    build(load_model(model_file(NET.format(line=line, size="")), {}, None), "float32")


def test_parts_that_have_no_number_in_common() -> None:
    """Against the places that are read, of every two parts of a matrix."""
    whole = torch.arange(24).view(4, 6)
    parts = [whole[rows, columns] for rows in (slice(0, 2), slice(1, 3), slice(2, 4), slice(None))
             for columns in (slice(0, 3), slice(2, 5), slice(3, 6), slice(None))]
    for one in parts:
        for other in parts:
            common = set(one.flatten().tolist()) & set(other.flatten().tolist())
            assert not (_apart(one, other) and common)
            assert common or _apart(one, other)
    assert not _apart(whole, whole.t())
