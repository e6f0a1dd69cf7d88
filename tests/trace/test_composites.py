"""Operations that torch composes of others are taken apart where nothing of ours knows the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from planner.trace.interpret import run

NET = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.f = nn.Embedding(48, 16), nn.Linear(16, 16)
        self.w, self.b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))
    def forward(self, input_ids):
        x = torch.tanh(self.f(self.e(input_ids)))
        {forward}
        return x @ self.e.weight.T
def make():
    return M()
{loss}
"""
FORWARDS = {
    "x = torch.concatenate([x, 2 * x], 1)[:, 8:24]": {"cat"},
    "x = torch.hstack([x, x])[:, ::2]": {"cat"},
    "x = torch.tensordot(x, self.w, dims=1)": {"matmul"},
    "x = torch.inner(x, self.w)": {"matmul"},
    "x = x * self.b.broadcast_to(x.shape)": {"expand"},
    "x = x * torch.outer(self.b, self.b)[3]": {"mul"},
    "x = torch.cat(torch.tensor_split(x, 3, dim=2), 2)": {"slice", "cat"},
    "x = F.avg_pool1d(x.mT, 3, 1, 1).mT": {"avg_pool2d"},
    "x = F.max_pool1d(x.mT, 3, 1, 1).mT": {"max_pool2d"},
    "x = torch.diff(x, dim=1, prepend=x[:, :1])": {"sub"},
    "x = torch.tile(x, (1, 2, 1))[:, ::2]": {"repeat"},
    "x = x.clip(min=0)": {"clamp"},
    "x = torch.take_along_dim(x, x.argsort(1), 1)": {"gather"},
    "x = F.pairwise_distance(x, -x)[..., None] * x": {"norm"},
    "x = torch.vmap(lambda sample: torch.tanh(sample @ self.w) + self.b)(x)": {"matmul", "tanh"},
    "x = x + torch.vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(self.w)[3]": {"cumsum"},
    "x = x @ F.batch_norm(self.w[None], None, None, self.b, training=True, eps=1e-6)[0].T": {"group_norm"},
    "x = F.instance_norm(x.mT, weight=self.b, bias=-self.b, eps=1e-6).mT": {"group_norm"},
    # Rotary embeddings of all of a head's size leave nothing to pass by.
    "x = torch.cat([-x[..., :8], x[..., 8:], x[..., 16:].reshape(len(x), 16, 0)], -1)": {"cat", "neg"},
    "x = 2 * torch.cat([x, x[..., 16:].expand(-1, 16, 0)], -1)": {"mul"},
    # Two batches in one: where the second begins is no sample's place.
    "x = torch.cat([x, -x])[len(x):] * torch.cat([x, x])[:len(x)]": {"cat", "neg", "slice"},
    # Recurrent cells overwrite their gates.
    "x = torch.gru_cell(x.flatten(0, 1), -x.flatten(0, 1), self.w.repeat(3, 1), self.w.repeat(3, 1)).view_as(x)": {
        "split", "sigmoid", "tanh",
    },
    "x = torch.lstm_cell(x.flatten(0, 1), (-x.flatten(0, 1), x.flatten(0, 1)), self.w.repeat(4, 1), self.w.repeat(4, 1))"
    "[1].view_as(x)": {"split", "sigmoid", "tanh"},
    "x = torch.rnn_tanh_cell(x.flatten(0, 1), -x.flatten(0, 1), self.w, self.w, self.b, self.b).view_as(x)": {"tanh"},
    # One order of dims, however it is said.
    "x = x @ self.w.T": {"transpose"},
    "x = torch.einsum('bsd,d->bds', x, self.b).swapaxes(1, 2)": {"mul", "transpose"},
    "x = (2 * x.movedim(1, 2)).moveaxis(2, 1)": {"transpose"},
    "x = x.unflatten(2, (2, 8)).movedim((1, 2), (3, 1)).permute(0, 3, 1, 2).flatten(2)": {"permute"},
}
UNKNOWN = {
    "avg_pool1d", "broadcast_to", "clip", "concatenate", "diff", "gru_cell", "hstack", "inner", "lstm_cell", "max_pool1d",
    "max_pool2d_with_indices", "moveaxis", "movedim", "numpy_T", "outer", "pairwise_distance", "rnn_tanh_cell", "swapaxes",
    "take_along_dim", "tensor_split", "tensordot", "tile",
}
Write = Callable[[str], str]


def traced(file: Write, forward: str, loss: str = "") -> ModelGraph:
    source = load_model(file(NET.format(forward=forward, loss=loss)), {}, None)
    return trace_model(source, sequence=16, dtype="float64")


def bases(graph: ModelGraph) -> set[str]:
    return {node.base for body in graph.bodies for node in body.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("forward", FORWARDS)
def test_parts(model_file: Write, forward: str) -> None:
    graph = traced(model_file, forward)
    found = bases(graph)
    assert FORWARDS[forward] <= found
    assert not UNKNOWN & found
    assert not any(0 in type_.shape for body in graph.bodies for node in body.nodes for type_ in node.types)


@pytest.mark.slow
@pytest.mark.parametrize("forward", FORWARDS)
def test_parts_compute_the_same(model_file: Write, forward: str) -> None:
    spec = model_file(NET.format(forward=forward, loss=""))
    source = load_model(spec, {}, None)
    graph = trace_model(source, sequence=16, dtype="float64")
    model = source.build().double()
    batch = {"input_ids": torch.randint(48, (3, 16)), "labels": torch.randint(48, (3, 16))}
    logits = model(batch["input_ids"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    total, _ = run(graph, dict(model.named_parameters()), batch)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("line", "parts"), [
    ("F.l1_loss(outputs, target)", {"sub", "abs", "sum"}),
    ("F.kl_div(outputs.log_softmax(-1), target.softmax(-1))", {"xlogy", "mul", "sub", "sum"}),
    ("F.kl_div(outputs.log_softmax(-1), target.log_softmax(-1), log_target=True)", {"exp", "mul", "sub", "sum"}),
])
def test_losses(model_file: Write, line: str, parts: set[str]) -> None:
    loss = f"def loss(outputs, batch):\n    target = F.one_hot(batch['labels'], 48).to(outputs.dtype)\n    return {line}"
    found = bases(traced(model_file, "x = 2 * x", loss))
    assert parts - {"xlogy", "exp"} <= found
    assert not {"l1_loss", "kl_div", "mean"} & found


def test_what_has_no_gradient_stays_as_it_is_said(model_file: Write) -> None:
    graph = traced(model_file, "places = torch.arange(16.)\n        x = x + torch.outer(places, places)")
    assert "outer" in {node.base for body in (graph.context, *graph.bodies) for node in body.nodes}
