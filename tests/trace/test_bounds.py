"""How large whole numbers of the batch may be: what chooses by them says, else their targets, else the example inputs."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from planner.ir.graph import BatchInput
from planner.ir.serialize import fingerprint
from planner.trace import load_model, trace_model

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.h = nn.Parameter(torch.randn(40, 16)), nn.Linear(16, 30)
    def forward(self, input_ids):
        return self.h({value})

def example_inputs(batch, seq):
    return {{"input_ids": torch.randint(0, 25, (batch, seq)), "labels": torch.{labels}}}

def loss(outputs, batch):
    return F.cross_entropy({outputs}, batch["labels"].flatten())

def make():
    return Net()
"""
BY_TOKEN, BY_SAMPLE = ("randint(0, 5, (batch, seq))", "outputs.flatten(0, 1)"), ("randint(0, 5, (batch,))", "outputs.mean(1)")


def inputs(model_file: Callable[[str], str], value: str, labels: str, outputs: str) -> dict[str, BatchInput]:
    spec = model_file(NET.format(value=value, labels=labels, outputs=outputs))
    return {given.name: given for given in trace_model(load_model(spec, {}, None), sequence=8, dtype="float32").batch_inputs}


@pytest.mark.slow
@pytest.mark.parametrize("value", [
    "F.embedding(input_ids, self.w)", "self.w[input_ids]", "self.w[input_ids.roll(1, 1)[:, :4]].repeat(1, 2, 1)",
    "self.w.index_select(0, input_ids.reshape(-1)).view(-1, 8, 16)", "F.one_hot(input_ids, 40).to(self.w.dtype) @ self.w",
    "self.w.T.unsqueeze(0).expand(len(input_ids), -1, -1).gather(2, input_ids[:, None].expand(-1, 16, -1)).mT",
    "torch.zeros(len(input_ids), 8, 40).scatter(2, input_ids[..., None], 1.0) @ self.w",
    "self.w[torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids[:, 1:]], 1)]",
    "self.w.T[None, torch.arange(16)[:, None, None], input_ids][0].permute(1, 2, 0)",
])
def test_what_chooses_by_them_says(model_file: Callable[[str], str], value: str) -> None:
    found = inputs(model_file, value, *BY_SAMPLE)
    assert [(given.high, given.shown) for given in found.values()] == [(40, 0), (30, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("value", [
    "F.embedding((31 * input_ids + 7) % 40, self.w)",
    "((input_ids[..., None] >> torch.arange(6)) & 1).to(self.w.dtype) @ self.w[:6]",
    "self.w[:8] * torch.ones(len(input_ids), 1, 1)",
])
def test_what_no_line_says_targets_or_examples_show(model_file: Callable[[str], str], value: str) -> None:
    """A file's tokens are the targets too, where there is one for each."""
    assert (found := inputs(model_file, value, *BY_TOKEN)["input_ids"]).high == 30 and found.shown == 0
    assert (found := inputs(model_file, value, *BY_SAMPLE)["input_ids"]).high == 0 and found.shown == 25


def test_targets_have_fewer_classes(model_file: Callable[[str], str]) -> None:
    assert inputs(model_file, "F.embedding(input_ids, self.w)", *BY_TOKEN)["input_ids"].high == 30


DRAWN = """
import random
import numpy as np
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(16, 30)
        self.register_buffer("mix", torch.tensor(np.random.randn(40, 16), dtype=torch.float32))
        self.gain = random.random()
    def forward(self, input_ids):
        return self.h(self.mix[input_ids] * self.gain)

def example_inputs(batch, seq):
    return {"input_ids": torch.tensor(np.random.randint(0, 25, (batch, seq)), dtype=torch.long),
            "labels": torch.tensor([[random.randrange(99) for _ in range(seq)] for _ in range(batch)])}

def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten() % 30)

def make():
    return Net()
"""


def test_a_trace_is_the_same_whatever_generator_the_file_draws_from(model_file: Callable[[str], str]) -> None:
    """numpy's and Python's own; both go on as if nothing had been drawn."""
    spec = model_file(DRAWN)
    random.seed(3)
    np.random.seed(3)
    first, second = (trace_model(load_model(spec, {}, None), sequence=8, dtype="float32") for _ in range(2))
    assert fingerprint(first) == fingerprint(second) and first.buffers[0].data == second.buffers[0].data
    drawn = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert drawn == (random.random(), np.random.rand())
