"""What a model file gives as examples, however it makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.graph import BatchInput, ModelGraph
from planner.trace import load_model, trace_model

ModelFile = Callable[[str], str]

FILE = """
import functools

KEPT = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
    def forward(self, x):
        return self.inner({forward})

def make():
    return Net()

def loss(outputs, batch):
    return F.mse_loss(outputs, batch["y"].to(outputs.dtype))

@functools.cache
def data():
    return torch.rand(100, 8), torch.randint(9, (100, 4))

@functools.cache
def bins():
    return torch.linspace(0, 1, 8)

def kept():
    global KEPT
    KEPT = torch.rand(100, 8) if KEPT is None else KEPT
    return KEPT

def example_inputs(batch, seq):
    {given}
"""


def traced(model_file: ModelFile, given: str, forward: str = "x", sequence: int | None = None) -> ModelGraph:
    spec = model_file(FILE.replace("{given}", given).replace("{forward}", forward))
    return trace_model(load_model(spec, {}, None), sequence=sequence, dtype="float32")


def inputs(model_file: ModelFile, given: str, forward: str = "x") -> dict[str, BatchInput]:
    return {entry.name: entry for entry in traced(model_file, given, forward).batch_inputs}


@pytest.mark.parametrize(("given", "forward"), [
    ("return {'x': data()[0][:batch], 'y': data()[1][:batch]}", "x"),
    ("return {'x': torch.tensor([kept()[i].tolist() for i in range(batch)]), 'y': torch.randint(9, (batch, 4))}", "x"),
    ("return {'x': torch.from_numpy(data()[0].numpy()[:batch]), 'y': torch.randint(9, (batch, 4))}", "x"),
    ("return {'x': torch.rand(batch, bins().shape[0]), 'y': torch.randint(9, (batch, 4))}", "x * bins()"),
])
def test_a_file_may_keep_what_it_makes(model_file: ModelFile, given: str, forward: str) -> None:
    """For its next call, or for forward: it is as real as in the user's own script."""
    found = inputs(model_file, given, forward)
    assert (found["x"].like, found["y"].shown) == (("unit",), 9)


@pytest.mark.parametrize("given", [
    "return {'x': torch.rand(batch, 8), 'y': torch.ones(batch, 4), 'long': torch.zeros(batch, 1000, seq)}",
    "at = torch.arange(seq)\n    return {'x': torch.rand(batch, 8), 'y': torch.ones(batch, 4), "
    "'long': (at[:, None] >= at).expand(batch, -1, -1)}",
    "return {'x': kept()[:batch], 'y': torch.ones(batch, 4), 'long': torch.zeros(batch, seq, 1000)}",
    "return {'x': torch.rand(batch, 8, device='cuda:77'), 'y': torch.ones(batch, 4)}",
], ids=["long", "mask", "kept", "elsewhere"])
def test_what_does_not_fit_here_is_made_without_values(model_file: ModelFile, given: str) -> None:
    """A sample of a billion numbers takes no memory, nor does one need the device that it is for."""
    assert traced(model_file, given, sequence=1_000_000).blocks


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 20, 63])
def test_a_file_may_hold_few_samples(model_file: ModelFile, rows: int) -> None:
    """Their values tell as much as many would."""
    found = inputs(model_file, f"each = list(range(batch))\n"
                   f"    return {{'x': data()[0][:{rows}][each], 'y': data()[1][:{rows}][each].clamp(8)}}")
    assert (found["x"].like, found["y"].shown) == (("unit",), 9)
