"""Random draws become numbers like a tensor that is there: the same distribution, and no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.ir.inlining import DRAWN, draws
from planner.trace import load_model, trace_model
from planner.trace.interpret import run
from planner.trace.source import ModelSource

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        h = self.a(x)
        return {forward}

class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.f(x) * (torch.rand(x.shape[0], 1, 1) < 0.5)

class Denoising(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Passing() for _ in range(3))
        self.level = nn.Embedding(5, 8)
    def forward(self, x):
        level = torch.randint(0, 5, (x.shape[0],))
        noise = torch.randn_like(x)
        x = x + self.level(level)[:, None] * noise
        for layer in self.layers:
            x = layer(x)
        return x - noise

def example_inputs(batch, seq):
    return {{"x": torch.randn(batch, 16, 8), "y": torch.randn(batch, 16, 8)}}

def loss(outputs, batch):
    return {loss}
"""
SQUARES = "(outputs - batch['y']).square().mean()"


def source(tmp_path: Path, forward: str = "h", loss: str = SQUARES, model: str = "Mixed") -> ModelSource:
    path = tmp_path / "drawing.py"
    path.write_text(FILE.format(forward=forward, loss=loss))
    return load_model(f"{path}:{model}", {}, None)


def drawn(graph: ModelGraph) -> list[str]:
    return [node.base for body in (graph.context, *graph.bodies) for node in body.nodes if draws(node)]


@pytest.mark.slow
@pytest.mark.parametrize("forward", [
    "h + torch.exp(h) * torch.randn_like(h)", "h * torch.rand_like(h)",
    "h + torch.randn(*h.shape, dtype=h.dtype)", "h * torch.rand(h.shape, dtype=h.dtype)",
    "h * torch.empty_like(h).uniform_(-1, 3)", "h * torch.zeros_like(h).normal_(2.0, 0.5)",
    "h * torch.empty_like(h).exponential_(2.0)", "h + torch.randint(3, 9, h.shape)", "h * torch.randint_like(h.detach(), 5)",
    "h + torch.empty_like(h).random_(6)", "F.gumbel_softmax(h, tau=0.5)", "h + F.gumbel_softmax(h, hard=True)",
    "h + torch.normal(h, 2.0)", "h + torch.normal(0.5, torch.exp(h))", "h + torch.normal(h, torch.exp(h))",
    "torch.distributions.Normal(h, torch.exp(h), validate_args=False).rsample()",
    "torch.distributions.Normal(h, torch.exp(h)).rsample()", "h + torch.distributions.Gumbel(h, 1.0).rsample()",
    "h * torch.distributions.Uniform(torch.zeros_like(h), 2.0).rsample()",
])
def test_the_numbers_are_the_plain_models(tmp_path: Path, forward: str) -> None:
    """Where torch makes them in the same way, under the same seed; and so are the loss's gradients."""
    model = source(tmp_path, forward)
    graph = trace_model(model, dtype="float64")
    assert len(drawn(graph)) == 1 and set(drawn(graph)) <= DRAWN
    torch.set_default_dtype(torch.float64)
    try:
        plain = model.build()
        batch = {name: torch.randn(4, 16, 8) for name in ("x", "y")}
        torch.manual_seed(3)
        expected = model.loss(plain(batch["x"]), batch)  # type: ignore[misc]
        torch.manual_seed(3)
        total, weight = run(graph, dict(plain.named_parameters()), batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(total / weight, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(each, list(plain.parameters())) for each in (total / weight, expected))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "mean"), [
    ("torch.bernoulli(torch.full_like(h, 0.3))", 0.3), ("torch.bernoulli(0 * h + 0.3)", 0.3),
    ("torch.empty_like(h).bernoulli_(0.3)", 0.3), ("torch.empty_like(h).bernoulli_(torch.full_like(h, 0.3))", 0.3),
    ("(torch.rand(h.shape[0], 1, 1) < 0.3).to(h.dtype)", 0.3), ("h.new_empty(h.shape[0], 1, 1).bernoulli_(0.3)", 0.3),
    ("F.dropout1d(torch.ones_like(h), 0.3)", 1.0), ("F.dropout2d(torch.ones_like(h)[..., None], 0.3)[..., 0]", 1.0),
])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_chances_are_as_they_are_written(tmp_path: Path, forward: str, mean: float, dtype: str) -> None:
    """In bfloat16 too, whose own uniform numbers are too coarse to be compared with a chance."""
    graph = trace_model(source(tmp_path, f"0 * h + {forward}", "outputs.float().mean()"), dtype=dtype)
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    total, weight = run(
        graph, {"a.weight": torch.zeros(8, 8, dtype=kind), "a.bias": torch.zeros(8, dtype=kind)},
        {name: torch.zeros(20_000, 16, 8, dtype=kind) for name in ("x", "y")},
    )
    assert drawn(graph) == ["rand_like"]
    assert float(total / weight) == pytest.approx(mean, abs=0.02 if mean == 0.3 else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dropped", ["alpha_dropout", "feature_alpha_dropout"])
@pytest.mark.parametrize(("statistic", "expected"), [("outputs.mean()", 0.0), ("outputs.square().mean()", 1.0)])
def test_alpha_dropout_keeps_mean_and_variance(tmp_path: Path, dropped: str, statistic: str, expected: float) -> None:
    """Klambauer et al. 2017: of values with a mean of 0 and a variance of 1."""
    graph = trace_model(source(tmp_path, f"F.{dropped}(x + 0 * h, 0.3, True)", statistic), dtype="float64")
    parameters = {"a.weight": torch.zeros(8, 8, dtype=torch.float64), "a.bias": torch.zeros(8, dtype=torch.float64)}
    torch.manual_seed(0)
    total, weight = run(graph, parameters, {name: torch.randn(20_000, 16, 8, dtype=torch.float64) for name in ("x", "y")})
    assert drawn(graph) == ["rand_like"]
    assert (total / weight).item() == pytest.approx(expected, abs=0.02)


def test_what_a_layer_draws_stays_with_it(tmp_path: Path) -> None:
    """So layers are alike; what the whole model reads again comes of the batch alone, and every stage draws it for itself."""
    graph = trace_model(source(tmp_path, model="Denoising"), dtype="float32")
    assert sorted(node.base for node in graph.context.nodes if draws(node)) == ["randint_like", "randn_like"]
    layers = [block for block in graph.blocks if block.name.startswith("layers")]
    assert len(layers) == 3 and len({block.body for block in layers}) == 1
    assert len({block.reads[1:] for block in layers}) == 1
    (body,) = {block.body for block in layers}
    assert [node.base for node in graph.body_of[body].nodes if draws(node)] == ["rand_like"]
    assert not any(node.differentiable for each in graph.bodies for node in each.nodes if draws(node))


@pytest.mark.parametrize(("forward", "loss", "said"), [
    ("h + torch.rand(8)", SQUARES, "rand draws random numbers once for all samples; .*draw for every sample"),
    ("h + torch.randn_like(self.a.bias)", SQUARES, "randn_like draws random numbers once for all samples"),
    ("h + torch.randn(h.shape[0] * 16, 8).view(-1, 16, 8)", SQUARES, "which of the numbers that randn_like draws are a samp"),
    ("h - torch.randn_like(h).mean(0)", SQUARES, "mean.*batch|blends samples"),
    ("h + h[torch.randint(0, len(h), (len(h),))]", SQUARES, "randint_like computes with the batch size"),
    ("h + torch.randn(h.shape, generator=torch.Generator())", SQUARES, "draws from a generator of its own; leave it out"),
    ("torch.manual_seed(0) and h + torch.randn_like(h)", SQUARES, "forward seeds torch's generator; leave it out"),
    ("h + torch.empty_like(h).random_()", SQUARES, "random draws random numbers in a way that no program repeats"),
    ("h + torch.empty_like(h).random_(2, 6)", SQUARES, r"torch cannot trace random_\(low, high\); use"),
    ("F.dropout1d(h, 1.0)", SQUARES, "feature_dropout draws random numbers in a way that no program repeats"),
    ("torch.poisson(h.exp())", SQUARES, "poisson draws random numbers in forward; draw by dropout, randn_like, rand_like"),
])
def test_what_no_program_repeats_is_refused(tmp_path: Path, forward: str, loss: str, said: str) -> None:
    with pytest.raises(ModelError, match=rf"drawing\.py.*{said}"):
        trace_model(source(tmp_path, forward, loss), dtype="float32")


@pytest.mark.parametrize("like", ["x", "h"])
def test_a_loss_may_be_divided_by_what_is_drawn(tmp_path: Path, like: str) -> None:
    """Masks, as masked language models draw them: the terms' weight counts those of the loss."""
    loss = "(outputs[0] * 0 + 3 * outputs[1]).sum() / outputs[1].sum()"
    graph = trace_model(source(tmp_path, f"h, (torch.rand_like({like}) < 0.2).to(h.dtype)", loss), dtype="float64")
    assert drawn(graph) == ["rand_like"]
    parameters = {"a.weight": torch.zeros(8, 8, dtype=torch.float64), "a.bias": torch.zeros(8, dtype=torch.float64)}
    total, weight = run(graph, parameters, {name: torch.zeros(40, 16, 8, dtype=torch.float64) for name in ("x", "y")})
    assert 0.15 < weight.item() / (40 * 16 * 8) < 0.25
    assert total.item() == pytest.approx(3 * weight.item(), rel=1e-12)


def test_rows_of_an_activation_may_be_drawn_like(tmp_path: Path) -> None:
    """[batch x 16, 8]: sample by sample, as the activation is."""
    rows = "(h.flatten(0, 1) * torch.zeros_like(h.flatten(0, 1)).uniform_()).view(-1, 16, 8)"
    graph = trace_model(source(tmp_path, rows), dtype="float32")
    assert drawn(graph) == ["rand_like"]
