"""What a model draws at random is the same under every plan that gives a rank the same samples. Float64 on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.trace import load_model, trace_model
from tests.matrix.build import Row, label
from tests.matrix.programs import emitted, losses, small_graph
from tests.matrix.reference import worst_gradient
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
FIRST = Row(data=2, accumulation=2, microbatch=2)


@pytest.fixture(scope="module")
def first(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the gradients of the first."""
    folder = tmp_path_factory.mktemp("first")
    program = emitted(small_graph("diffused"), FIRST, folder / "program")
    return losses(program.train(workers, 3, "--dump-gradients", str(folder / "first.pt"))), torch.load(folder / "first.pt")


@pytest.mark.parametrize("row", [
    Row(data=2, pipeline=2, accumulation=2, microbatch=2, recompute="full"),
    wide(Row(data=2, pipeline=2, schedule="interleaved-zero-bubble", accumulation=2, microbatch=2)),
    wide(Row(data=2, zero=2, accumulation=2, microbatch=2, recompute="mixed")),
], ids=label)
def test_numbers_do_not_depend_on_the_plan(
    workers: Workers, first: tuple[list[float], dict[str, torch.Tensor]], row: Row, tmp_path: Path
) -> None:
    """The first stage and the last draw the same noise."""
    program = emitted(small_graph("diffused"), row, tmp_path / "program")
    found = losses(program.train(workers, 3, "--dump-gradients", str(tmp_path / "gradients.pt")))
    assert found == pytest.approx(first[0], rel=1e-10)
    assert worst_gradient(torch.load(tmp_path / "gradients.pt"), first[1])[1] <= 1


DETERMINED = '''    from runtime.random_stream import RandomStream

    def determined(plain):
        def draw(stream, like, **named):
            if not stream.name or like.shape[-1] == 1:  # whole, or like what holds no numbers
                return plain(stream, like, **named) if not named["sharded"] else torch.zeros_like(like)
            return 0.01 + 0.98 * like.detach().cos().square()
        return draw

    RandomStream.normal, RandomStream.uniform = determined(RandomStream.normal), determined(RandomStream.uniform)
    RandomStream.exponential = determined(RandomStream.exponential)
    train(build(), options)
'''
"""In place of random numbers like an activation, numbers that follow from it: those of a part are a part of the whole's."""


def test_tensor_ranks_draw_what_their_parts_are_like(workers: Workers, tmp_path: Path) -> None:
    found = []
    for row in (FIRST, Row(data=2, tensor=2, sequence_parallel=True, accumulation=2, microbatch=2, recompute="selective")):
        program = emitted(small_graph("diffused"), row, tmp_path / row.label)
        program.edit("train.py", "    train(build(), options)\n", DETERMINED)
        gradients = tmp_path / f"{row.label}.pt"
        found.append((losses(program.train(workers, 3, "--dump-gradients", str(gradients))), torch.load(gradients)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    assert worst_gradient(found[1][1], found[0][1])[1] <= 1


MASKED = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        mask = (torch.rand(x.shape[0], 5) < 0.3).to(x.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x + mask[..., None]))
        return x, mask

def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 5, 8)}

def loss(outputs, batch):
    given, mask = outputs
    return ((given.sum(-1) - given.sum(-1).detach() + 1) * mask).sum() / mask.sum()
"""


@pytest.mark.parametrize("row", [
    Row(data=2, pipeline=2, accumulation=3, microbatch=2), wide(Row(data=2, tensor=2, accumulation=2, microbatch=2)),
], ids=label)
def test_a_loss_is_divided_by_the_masks_that_it_draws(workers: Workers, row: Row, tmp_path: Path) -> None:
    """Every term is 1: so is their mean, where those that are counted before the step are those of the step."""
    (tmp_path / "masked.py").write_text(MASKED)
    graph = trace_model(load_model(f"{tmp_path / 'masked.py'}:Masked", {}, None), dtype="float64")
    gradients = tmp_path / "gradients.pt"
    program = emitted(graph, row, tmp_path / "program")
    assert losses(program.train(workers, 3, "--dump-gradients", str(gradients))) == pytest.approx([1.0] * 3, rel=1e-12)
    assert all(bool(gradient.any()) for gradient in torch.load(gradients).values())


TWO_MASKS = """
        return x, mask, torch.bernoulli(torch.full_like(mask, 0.5))

def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 5, 8)}

def loss(outputs, batch):
    given, *masks = outputs
    ones = given.sum(-1) - given.sum(-1).detach() + 1
    return sum((ones * mask).sum() / mask.sum() for mask in masks)
"""


def test_a_loss_is_divided_by_several_masks(workers: Workers, tmp_path: Path) -> None:
    """They are drawn of no input: what is made of them for the weights read an average's share, which comes of the weights."""
    (tmp_path / "masked.py").write_text(MASKED.partition("        return x, mask")[0] + TWO_MASKS)
    graph = trace_model(load_model(f"{tmp_path / 'masked.py'}:Masked", {}, None), dtype="float64")
    program = emitted(graph, Row(data=2, pipeline=2, accumulation=2, microbatch=2), tmp_path / "program")
    assert losses(program.train(workers, 2)) == pytest.approx([2.0, 2.0], rel=1e-12)


def test_a_resumed_run_draws_on(
    workers: Workers, first: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    program = emitted(small_graph("diffused"), FIRST, tmp_path / "program")
    kept = str(tmp_path / "kept")
    begun = losses(program.train(workers, 1, "--checkpoint", kept))
    assert begun + losses(program.train(workers, 3, "--checkpoint", kept)) == pytest.approx(first[0], rel=1e-12)
    assert len(set(first[0])) == 3


CALLED = """
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        h = self.b(torch.tanh(self.a(x)))
        noise = torch.randn_like(h)
        return h + noise, noise

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.context, self.question = Noisy(), Noisy()
    def forward(self, x):
        noise = torch.randn_like(x)
        h, first = self.context(x + noise)
        h, second = self.question(h)
        return h, noise, first, second

def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 500, 8)}

def loss(outputs, batch):
    h, *noise = outputs
    return (0 * h + noise[%d] * noise[%d]).mean()
"""


@pytest.mark.parametrize("pair", [(0, 1), wide((0, 2)), wide((1, 2)), wide((1, 1))], ids=str)
def test_a_block_of_any_name_draws_other_numbers(workers: Workers, pair: tuple[int, int], tmp_path: Path) -> None:
    """A block called ``context`` drew the batch's noise once more."""
    (tmp_path / "called.py").write_text(CALLED % pair)
    graph = trace_model(load_model(f"{tmp_path / 'called.py'}:Reader", {}, None), dtype="float64")
    assert [block.name for block in graph.blocks][:2] == ["context", "question"]
    (found,) = losses(emitted(graph, Row(microbatch=4), tmp_path / "program").train(workers, 1))
    assert found == pytest.approx(float(pair[0] == pair[1]), abs=0.05)
