"""Floats of a batch are made up like those that the model file shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from planner.trace.examples import examples, likeness, likenesses
from planner.trace.source import ModelSource
from runtime.data import Batches, BatchInput

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

def make():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 6), "y": torch.zeros(batch, 1), "weight": torch.rand(batch, 1),
            "kept": torch.ones(batch, 1), "mask": torch.randint(0, 2, (batch, 1)).float(),
            "price": 9 * torch.rand(batch, 1) + 1}

def loss(outputs, batch):
    weight = batch["weight"] * batch["kept"] * batch["mask"] * batch["price"]
    return (F.mse_loss(outputs, batch["y"], reduction="none") * weight).sum(), weight.sum()
"""


@pytest.mark.parametrize(("values", "expected"), [
    ([0.5, -1.0, 2.0], ("normal",)), ([0.0, 0.0], ("normal",)), ([1.0, 1.0], ("constant", 1.0)),
    ([-2.0, -2.0], ("constant", -2.0)),
    ([0.0, 1.0, 1.0], ("mask",)), ([0.0, 0.3, 1.0], ("unit",)), ([0.0, 1.5], ("positive",)), ([float("inf"), 1.0], ("normal",)),
    ([], ("normal",)),
])
def test_what_values_are_like(values: list[float], expected: tuple[str | float, ...]) -> None:
    assert likeness(torch.tensor(values)) == expected


def graph(tmp_path: Path) -> ModelGraph:
    path = tmp_path / "weighted.py"
    path.write_text(FILE)
    return trace_model(load_model(f"{path}:make", {}, None), sequence=None, dtype="float32")


def test_a_float_mask_weighs_nothing_negative(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    traced = graph(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert {given.name: given.like for given in traced.batch_inputs} == {
        "x": ("normal",), "y": ("normal",), "weight": ("unit",), "kept": ("constant", 1.0), "mask": ("mask",),
        "price": ("positive",),
    }
    inputs = [
        BatchInput(given.name, given.type.sizes(1)[1:], torch.float32, given.role, given.high, like=given.like)
        for given in traced.batch_inputs
    ]
    batch = Batches(inputs, None, 0, 200, 0, 1, torch.device("cpu")).at(0)
    assert batch["x"].min() < 0 and batch["y"].min() < 0
    assert 0 <= batch["weight"].min() < 0.1 and 0.9 < batch["weight"].max() < 1
    assert batch["kept"].unique().tolist() == [1] and batch["mask"].unique().tolist() == [0, 1]
    assert batch["price"].min() >= 0 and batch["price"].max() > 1


DATA = """
import torch
from torch import nn

DATA = torch.tensor([[index * 8 % 30 + position for position in range(8)] for index in range(10)])
CALLS = []

def make():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))

def example_inputs(batch, seq):
    CALLS.append(batch)
    rows = torch.stack([DATA[index, :seq] for index in range(min(batch, len(DATA)))])
    return {"input_ids": rows, "labels": torch.tensor(rows.tolist())}
"""


def test_inputs_are_asked_for_in_small_numbers(tmp_path: Path) -> None:
    """A file may hold few samples, make them one by one or by a library that allocates them; not a million."""
    path = tmp_path / "data.py"
    path.write_text(DATA)
    source = load_model(f"{path}:make", {}, None)
    traced = trace_model(source, sequence=8, dtype="float32")
    assert [(given.name, given.type.sizes(5)) for given in traced.batch_inputs] == [("input_ids", (5, 8)), ("labels", (5, 8))]
    assert source.example_inputs is not None and max(source.example_inputs.__globals__["CALLS"]) <= 64


def test_an_example_that_has_no_real_values_says_nothing() -> None:
    def broken(batch: int, seq: int | None) -> dict[str, torch.Tensor]:
        raise OSError(batch, seq)

    source = ModelSource("model.py:make", torch.nn.Identity, broken, None, "make")
    traced = {"x": torch.zeros(9, 1), "ids": torch.zeros(9, 1, dtype=torch.int64)}
    assert examples(source, "float32", None, traced) == {}
    assert examples(replace(source, example_inputs=None), "float32", None, traced) == {}
    shown = replace(source, example_inputs=lambda batch, seq: {"x": torch.ones(batch), "ids": torch.ones(batch).long()})
    assert likenesses(examples(shown, "float64", None, traced)) == {"x": ("constant", 1.0)}
