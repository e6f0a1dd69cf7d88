"""What Python computes from the number of samples is refused by its line; shapes that hold it are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from planner.trace.batches import MANY, Record, Scale, difference
from tests.trace.test_trace import both

MODEL = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        {layer}
        return x + self.b(torch.tanh(self.a(x)))

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.cached = None
    def forward(self, input_ids):
        x = self.e(input_ids)
        B, T, _ = x.shape
        {line}
        for layer in self.layers:
            x = layer(x)
        return self.o(x)

def make():
    return M()
"""
NUMBER = "is computed from the number of samples; a plan divides the batch in many ways: "


def refusal(spec: str) -> str:
    with pytest.raises(ModelError) as error:
        trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")
    return str(error.value).replace(str(Path(spec.rpartition(":")[0])), "model")


@pytest.mark.slow
@pytest.mark.parametrize(("line", "what"), [
    ("x = x * (B // 2)", "number 500001 in mul"), ("x = x * max(1, B // 1000)", "number 1000 in mul"),
    ("x = x * min(B, 8)", "number 8 in mul"), ("x = x * torch.tensor(float(min(B, 8)))", "number 8.0 in tensor"),
    ("x = x * (1 / x.numel())", "number 3.906"), ("x = x / len(x) ** 0.25", "number 31.6"),
    ("x = F.pad(x, (0, 0, B % 2, 0))[:, :T]", "number 1 in pad"),
    ("x = x + (self.e if B > 64 else self.o).weight[:1].sum()", "operand of __getitem__"),
    ("x = x * torch.arange(B + 1, dtype=x.dtype)[0]", "number 1000004 in arange"),
    ("import numpy; x = x * float(numpy.float32(1 / B))", "number 9.99"),
    ("import numpy; x = x * (numpy.int64(B) // 2)", "number 500001"),
])
def test_numbers(model_file: Callable[[str], str], line: str, what: str) -> None:
    said = refusal(model_file(MODEL.format(line=line, layer="pass")))
    assert said.startswith(f"model:22: the {what}") and NUMBER in said


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "x = x * torch.tensor(B)", "x = x * x.new_tensor(B)", "x = x * torch.tensor([B, 1.0])[0]",
    "x = x / torch.tensor(B * T).sqrt()", "x = x * torch.tensor(x.shape).prod()", "x = x + x[range(B), -1].unsqueeze(1)",
])
def test_tensors_that_python_makes(model_file: Callable[[str], str], line: str) -> None:
    assert "a tensor is made of the number of samples, in Python" in refusal(model_file(MODEL.format(line=line, layer="pass")))


@pytest.mark.slow
@pytest.mark.parametrize("line", ["x = 3 * x if B > 64 else x", "x = x if B > 64 else 3 * x", "if B > 9: x = x.sin()"])
def test_branches(model_file: Callable[[str], str], line: str) -> None:
    said = refusal(model_file(MODEL.format(line=line, layer="pass")))
    assert said.startswith("model:22: which operations run depends on the number of samples; a plan divides the batch")


def test_in_repeated_modules(model_file: Callable[[str], str]) -> None:
    said = refusal(model_file(MODEL.format(line="pass", layer="x = x * min(len(x), 8)")))
    assert said.startswith(f"model:10: the number 8 in mul {NUMBER}")


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "x = x.view(B * T, -1).reshape(B, T, 16) + x.new_zeros(B, 1, 16).expand(B, T, 16)",
    "x = x + x[torch.arange(B)[:, None], input_ids % T]", "x = x + torch.zeros(B, T, 16)[:, :, :1]",
    "x = x + (torch.arange(B * T) % T).view(B, T)[:, :, None]",
    "x = x + F.embedding_bag(input_ids.view(-1, 2), self.e.weight).view(B, T // 2, 16).sum(1, keepdim=True)",
    "x = torch.cat([x, x], 1)[:B, :T] if B > 0 else x", "x = x * (x.numel() // B)",
])
def test_shapes_that_hold_the_batch(model_file: Callable[[str], str], line: str) -> None:
    assert both(load_model(model_file(MODEL.format(line=line, layer="pass")), {}, None))[1] < 1e-12


@pytest.mark.slow
def test_what_torch_calls_itself_where_a_function_changes_a_view(model_file: Callable[[str], str]) -> None:
    """More in the first pass than in those that follow."""
    own = """
class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.relu_())
        ctx.save_for_backward(x)
        return x
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0)
"""
    spec = model_file(own + MODEL.format(layer="pass", line="x = Relu.apply(self.layers[0].a(x))"))
    assert both(load_model(spec, {}, None))[1] < 1e-12


def test_what_the_first_pass_leaves_behind(model_file: Callable[[str], str]) -> None:
    """A table that is made once is no matter of the batch."""
    line = "self.cached = torch.arange(T).sin()[:, None] if self.cached is None else self.cached; x = x + self.cached"
    assert both(load_model(model_file(MODEL.format(line=line, layer="pass")), {}, None))[1] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "self.n = getattr(self, 'n', 0) + 1; x = x / self.n", "self.seen = [*getattr(self, 'seen', []), 1]; x = x * len(self.seen)",
    "self.seen = [*getattr(self, 'seen', []), 1]; x = x + sum(self.o.weight[0, 0] for _ in self.seen)",
])
def test_what_each_pass_changes(model_file: Callable[[str], str], line: str) -> None:
    said = refusal(model_file(MODEL.format(line=line, layer="pass")))
    assert said.startswith("model:22: ") and "how often forward has run; a program would have its first pass in every" in said


def test_a_table_that_is_made_anew_for_another_batch(model_file: Callable[[str], str]) -> None:
    """Beside one that is made once: the second pass differs from the first, and the third from the second."""
    line = ("self.cached = torch.arange(T).sin()[:, None] if self.cached is None else self.cached; x = x + self.cached; "
            "self.mask = self.mask if len(getattr(self, 'mask', ())) == B else x.new_ones(B, 1, 1); x = x * self.mask")
    assert both(load_model(model_file(MODEL.format(line=line, layer="pass")), {}, None))[1] < 1e-12


@pytest.mark.parametrize("values", [numpy.zeros((1_000_003, 3), dtype=bool), [0] * 1_000_003], ids=["array", "list"])
def test_a_million_numbers_are_not_looked_at_one_by_one(values: object) -> None:
    record = Record()
    with record.of(nn.Module()):
        torch.tensor(values)
    (call,) = record.calls
    assert len(tree_leaves(call.given)) < MANY + 10


def test_large_arrays_that_differ_in_a_number() -> None:
    """Are told apart, wherever it is."""
    records = []
    for last in (1, 1, 2):
        values = numpy.ones(MANY + 1)
        values[-1] = last
        records.append(Record())
        with records[-1].of(nn.Module()):
            torch.tensor(values)
    first, second, third = (record.calls for record in records)
    assert difference(first, second, Scale(1_000_003, 2)) is None
    parting = difference(first, third, Scale(1_000_003, 2))
    assert parting is not None and parting.said == "the operand of tensor is computed from"
