"""A user's loss becomes a sum and a weight whose ratio it is; what cannot is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from planner.trace.interpret import run, with_shares

MODEL = """
def example_inputs(batch, seq):
    return {{"features": torch.zeros(batch, 6), "labels": torch.zeros(batch, dtype=torch.int64),
            "target": torch.zeros(batch, 5), "scale": torch.ones(batch)}}

def loss(outputs, batch):
    {line}

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)
    def forward(self, features):
        return self.b(torch.tanh(self.a(features)))

def make():
    return M()
"""
MASKED = (
    "m = batch['labels'] != -100; l = F.cross_entropy(outputs, batch['labels'], reduction='none'); return (l * m).sum() / "
)


@pytest.mark.parametrize("line", [
    "return F.cross_entropy(outputs, batch['labels'])",
    "return F.cross_entropy(outputs, batch['labels'], label_smoothing=0.1)",
    "return F.nll_loss(outputs.log_softmax(-1), batch['labels'])",
    "return F.cross_entropy(outputs, batch['labels'], weight=torch.linspace(0.5, 2, 5))",
    "return torch.nn.CrossEntropyLoss(torch.arange(5.0), label_smoothing=0.1)(outputs, batch['labels'])",
    "return F.nll_loss(outputs.log_softmax(-1), batch['labels'], weight=torch.linspace(0.5, 2, 5))",
    "return F.cross_entropy(outputs, batch['target'].softmax(-1), weight=torch.linspace(0.5, 2, 5), label_smoothing=0.1)",
    "w = torch.linspace(0.5, 2, 5); t = batch['target'] > 0; return F.binary_cross_entropy_with_logits("
    "outputs, t.float(), weight=batch['scale'][:, None], pos_weight=w)",
    "return F.mse_loss(outputs, batch['target'])",
    "return ((outputs - batch['target']) ** 2).mean()",
    "return 0.5 * F.mse_loss(outputs, batch['target'])",
    "return ((outputs - batch['target']) ** 2 * batch['scale'][:, None]).sum() / batch['scale'].sum()",
    "return ((outputs - batch['target']) ** 2).sum() / outputs.shape[0]",
    "return ((outputs - batch['target']) ** 2).sum(), batch['target'].numel()",
    "return F.mse_loss(outputs, batch['target'], reduction='sum'), outputs.shape[0]",
    "return sum([F.mse_loss(outputs, batch['target'], reduction='sum')] * 2), 2 * outputs.shape[0]",
    "return outputs.new_zeros(()) + F.mse_loss(outputs, batch['target'], reduction='sum'), outputs.shape[0]",
    "return F.cross_entropy(outputs, batch['labels'], reduction='sum'), (batch['labels'] != -100).sum()",
    "return outputs.new_zeros(()) + F.mse_loss(outputs, batch['target'])",
    "m = (batch['scale'] > 0.3)[:, None].expand_as(outputs); return (outputs * m).sum() / m.sum()",
    MASKED + "m.sum().clamp(min=1)",
    MASKED + "(m.float().sum() + 1e-8)",
    MASKED + "torch.clamp(m.sum().float(), min=1e-6)",
    "m = batch['scale']; return (outputs.square() * m[:, None]).mean() / m.mean()",
    "m = batch['scale']; return 2 * (outputs.square() * m[:, None]).mean() / (m.mean() + 1e-3)",
    "m = batch['scale'] > 0.3; return (outputs.square() * m[:, None]).sum() * (3 / m.sum())",
    "m = batch['scale']; return m.sum().detach().pow(-1) * (outputs.square() * m[:, None]).sum()",
    "return outputs.square().sum() / batch['target'].count_nonzero()",
    "m = torch.ones_like(outputs) * batch['scale'][:, None]; return (outputs.square() * m).sum() / m.sum()",
    "return outputs.square().sum() / torch.full_like(outputs[:, 0], 2.0).sum()",
    MASKED + "torch.count_nonzero(m).clamp(min=1)",
    "return outputs.square().sum(), batch['target'].count_nonzero()",
    "return F.mse_loss(outputs, batch['target']) + 0.5 * F.l1_loss(outputs[:, 0], batch['scale']) - outputs.abs().mean()",
    "return 0.5 * F.mse_loss(outputs, batch['target']) + 0 * batch['scale'].mean()",
    "return batch['scale'].mean() / 2 + F.mse_loss(batch['target'], 0 * batch['target']) - outputs.square().mean()",
    "return sum((F.mse_loss(outputs, batch['target']), outputs.square().mean()))",
    "return F.cross_entropy(outputs, batch['labels']) + 0.1 * F.cross_entropy(2 * outputs, batch['labels'])",
    "w = torch.linspace(0.5, 2, 3); return sum(w[i] * F.cross_entropy((i + 1) * outputs, batch['labels']) for i in range(3))",
    "return F.mse_loss(outputs, batch['target']) / torch.tensor([2.0, 3.0])[1] * torch.ones(())",
    "return 1 - F.cosine_similarity(outputs, batch['target'] + 1).mean()",
    "return 3 - 2 * (0.25 + F.cross_entropy(outputs, batch['labels']) - 1.5)",
    "w = batch['scale']; return 1 - (outputs[:, 0].sigmoid() * w).sum() / w.sum()",
    "return torch.rsub(F.mse_loss(outputs, batch['target']), outputs.abs().mean(), alpha=2)",
    "return torch.sub(F.mse_loss(outputs, batch['target']), 0.5, alpha=3)",
    "w = batch['scale']; return (outputs[:, 0] * w).sum() / w.sum() - 2 * (outputs[:, 1] * w).sum() / batch['scale'].sum()",
    "return 2 * (outputs ** 2).sum() + F.mse_loss(outputs, batch['target'], reduction='sum'), batch['scale'].sum()",
])
def test_ratio_is_the_loss_and_parts_add_up(model_file: Callable[[str], str], line: str) -> None:
    source = load_model(model_file(MODEL.format(line=line)), {}, None)
    graph = trace_model(source, sequence=None, dtype="float32")
    torch.manual_seed(0)
    model = source.build()
    labels = torch.tensor([0, 4, -100, 2])
    batch = {"features": torch.randn(4, 6), "labels": labels, "target": torch.randn(4, 5), "scale": torch.rand(4)}
    used = {given.name for given in graph.batch_inputs}
    total, weight = run(graph, dict(model.named_parameters()), {name: batch[name] for name in used})
    assert source.loss is not None
    expected = source.loss(model(batch["features"]), batch)
    expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(total / weight, expected)
    parts = [run(graph, dict(model.named_parameters()), {name: batch[name][cut] for name in used})
             for cut in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(part for part, _ in parts), total)
    torch.testing.assert_close(sum(part for _, part in parts), weight)
    padding = {name: torch.full_like(batch[name][:2], -100) if name == "labels" else batch[name][:2] for name in used}
    if "'labels'" in line:
        assert [value.item() for value in run(graph, dict(model.named_parameters()), padding)] == [0, 0]


LEARNED = MODEL.replace("nn.Linear(8, 5)", "nn.Linear(8, 5)\n        self.s = nn.Parameter(torch.tensor([0.3, -0.7]))").replace(
    "return self.b(torch.tanh(self.a(features)))",
    "return self.b(torch.tanh(self.a(features))), self.s, 0.01 * sum(p.square().sum() for p in self.parameters())",
)


def assert_same_gradients(parameters: dict[str, torch.nn.Parameter], plain: torch.nn.Module, tolerance: float) -> None:
    for name, parameter in plain.named_parameters():
        ours, theirs = parameters[name].grad, parameter.grad
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert float((ours.double() - theirs).norm()) <= tolerance * max(float(theirs.norm()), 0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "return torch.exp(-s[0]) * F.mse_loss(y, t) + s[0]",
    "return s[0] + torch.exp(-s[0]) * F.mse_loss(y, t) + y.abs().mean() * torch.exp(-s[1]) + s[1]",
    "return sum(0.5 / s[i] ** 2 * l + torch.log(1 + s[i] ** 2) for i, l in enumerate([F.mse_loss(y, t), y.abs().mean()]))",
    "return F.mse_loss(y, t) / (2 * s[0] ** 2) - s.sum()",
    "return s[0] - 3 * F.mse_loss(y, t)",
    "return torch.rsub(F.mse_loss(y, t), s[1], alpha=2)",
    "return F.cross_entropy(y, batch['labels']) * s[1].exp() + penalty",
    "return F.mse_loss(y, t) + penalty / 3",
    "return F.mse_loss(y, t) + torch.tensor(0.5)",
    "return torch.exp(-s[0]) * F.mse_loss(y, t, reduction='sum'), len(y)",
    "return torch.exp(-s[0]) * F.cross_entropy(y, batch['labels'], reduction='sum') + s[0] * len(y) / 2, y.shape[0]",
    "a = F.cross_entropy(y, batch['labels'], reduction='sum'); return s[1] * (5 * len(y)) + a + penalty * y.numel(), len(y)",
    "return F.mse_loss(y, t, reduction='sum') / s[0] + s[1] * batch['scale'].sum(), batch['scale'].sum()",
    "return (torch.exp(-s) * torch.stack([F.mse_loss(y, t), y.abs().mean()]) + s).sum()",
    "l = torch.stack((F.cross_entropy(y, batch['labels']), F.l1_loss(y, t))); return (l / (2 * s**2) + s.abs().log()).mean()",
    "return (torch.stack([F.mse_loss(y, t, reduction='sum'), y.sum()]) * s.exp()).sum(0), len(y)",
    "l = torch.stack([F.mse_loss(y * i, t) for i in (0.5, 1, 2)]); return 3 - (1 - l * torch.tensor([0.2, 0.3, 0.5])).mean(0)",
    "return torch.stack([F.mse_loss(y, t)]).sum() + torch.stack([F.l1_loss(y, t), y.square().mean()]).sum()",
    "l = torch.stack([F.mse_loss(y, t), F.cross_entropy(y, batch['labels'])]); return l[-1] + 0.5 * l[0] + sum(l) / len(l)",
    "l = torch.stack([F.mse_loss(y, t), F.cross_entropy(y, batch['labels'])]); return l @ s.exp() + torch.dot(s, l * s)",
    "a, b = F.mse_loss(y, t), y.abs().mean(); l = torch.cat([a[None], torch.stack([b, a]), b.view(1)]); return l[2] + l.sum()",
    "return torch.hstack([F.mse_loss(y, t), F.cross_entropy(y, batch['labels'])]).mean() + y.abs().mean()[None].sum()",
    "l = torch.stack([F.mse_loss(y, t), y.abs().mean()]); return torch.stack([(l * s).sum(), l.mean(), y.mean()]).mean()",
    "m = batch['scale'] > 0.3; l = torch.stack([(y[:, 0] * m).sum(), y[:, 1].sum()]); n = torch.stack([m.sum(), m.sum()]); "
    "return (l / n.clamp(min=1) + s).mean()",
    "l = torch.stack([F.mse_loss(y, t, reduction='sum'), y.sum()]); return (torch.exp(-s) * l + s * len(y)).sum(), len(y)",
])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_learned_weights_of_terms_and_penalties_on_parameters(model_file: Callable[[str], str], line: str, dtype: str) -> None:
    """Scalars that are the same whatever the batch scale averages and are added to them; gradients are the plain ones."""
    text = LEARNED.format(line="y, s, penalty = outputs; t = batch['target']; " + line)
    source = load_model(model_file(text), {}, None)
    graph = trace_model(source, sequence=None, dtype=dtype)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = source.build().to(kind)
    batch = {"features": torch.randn(600, 6), "target": torch.randn(600, 5), "scale": torch.rand(600)}
    batch = {name: value.to(kind) for name, value in batch.items()} | {"labels": torch.arange(600) % 5}
    used = {given.name for given in graph.batch_inputs}
    parameters = dict(model.named_parameters())
    given = with_shares(graph, {name: value for name, value in batch.items() if name in used})
    total, weight = run(graph, parameters, given)
    assert total.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert source.loss is not None
    plain = source.build().double()
    plain.load_state_dict(model.state_dict())
    wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    expected = source.loss(plain(wide["features"]), wide)
    expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
    tolerance = 1e-12 if dtype == "float64" else 2e-2
    assert (total / weight).item() == pytest.approx(expected.item(), rel=tolerance)
    expected.backward()
    (total / weight).backward()
    assert_same_gradients(parameters, plain, tolerance)
    parts = [run(graph, parameters, {name: value[cut] for name, value in given.items()})
             for cut in (slice(0, 100), slice(100, 600))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(total.item(), rel=tolerance)


SOME = "m = batch['scale'] > 0.3; "


@pytest.mark.slow
@pytest.mark.parametrize(("line", "shares"), [
    ("return F.mse_loss(y, t) + F.cross_entropy(y, k)", 1),
    ("return F.cross_entropy(y, k) + F.cross_entropy(y, k.clamp(min=0), ignore_index=0) - F.cross_entropy(y + t, k) / 2", 2),
    ("return 0.5 * (F.cross_entropy(y, k) + F.mse_loss(y, t) + 3) - y.abs().mean() / 4", 1),
    (SOME + "return (y[:, 0] * m).sum() / m.sum() + F.mse_loss(y, t) - (y[:, 1] * m).sum() / m.sum().clamp(min=1)", 1),
    (SOME + "return F.cross_entropy(y, k) + (y[:, 0] * m).sum() / (m.float().sum() + 1e-8) + 1e-3", 2),
    ("w = batch['scale']; return (y[:, 0] * w).sum() / w.sum() + y.square().sum(1).mean()", 1),
    ("return torch.exp(-s[0]) * F.cross_entropy(y, k) + s[0] + torch.exp(-s[1]) * F.mse_loss(y, t) + s[1] + penalty", 1),
    ("return torch.rsub(F.cross_entropy(y, k), F.l1_loss(y, t), alpha=2)", 1),
    ("c = torch.arange(1, 6).to(y.dtype); return F.cross_entropy(y, k, c) + F.nll_loss(y + t, k, c) + F.mse_loss(y, t)", 1),
    ("c = torch.arange(1, 6).to(y.dtype); return F.cross_entropy(y, k, c) + F.cross_entropy(y, k)", 2),
    ("return F.mse_loss(y, t) + 0.1 * (F.cross_entropy(y, k) + F.l1_loss(y, t))", 1),
    ("m = batch['scale']; return (y[:, 0] * m).mean() / m.mean() + F.mse_loss(y, t) - y.sum() * (0.1 / m.sum())", 1),
    ("return F.cross_entropy(y, k) / batch['scale'].mean()", 2),
    ("return F.mse_loss(y, t) + torch.stack([F.cross_entropy(y, k), F.cross_entropy(y + t, k * 0)]).mean()", 2),
])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_averages_over_numbers_of_terms_that_the_batch_decides(
    model_file: Callable[[str], str], line: str, shares: int, dtype: str
) -> None:
    """Parts of a batch add up to the loss and the gradients of the whole, given the shares of the whole."""
    text = LEARNED.format(line="y, s, penalty = outputs; t, k = batch['target'], batch['labels']; " + line)
    source = load_model(model_file(text), {}, None)
    graph = trace_model(source, sequence=None, dtype=dtype)
    assert len(graph.shares) == shares
    assert [given.type.dtype for given in graph.batch_inputs if given.role == "share"] == shares * [
        "float64" if dtype == "float64" else "float32"
    ]
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = source.build().to(kind)
    batch = {"features": torch.randn(600, 6), "target": torch.randn(600, 5), "scale": torch.rand(600)}
    batch = {name: value.to(kind) for name, value in batch.items()} | {"labels": torch.arange(600) % 5}
    batch["labels"][:250:2] = -100
    plain, wide = source.build().double(), {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
    plain.load_state_dict(model.state_dict())
    used = {given.name for given in graph.batch_inputs}
    given = with_shares(graph, {name: value for name, value in batch.items() if name in used})
    parameters = dict(model.named_parameters())
    assert source.loss is not None
    expected = source.loss(plain(wide["features"]), wide)
    parts = [run(graph, parameters, {name: value[cut] for name, value in given.items()})
             for cut in (slice(0, 100), slice(100, 101), slice(101, 600))]
    total, weight = (torch.stack(each).sum() for each in zip(*parts, strict=True))
    assert weight == 600 and total.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    tolerance = 1e-12 if dtype == "float64" else 2e-2
    assert (total / weight).item() == pytest.approx(expected.item(), rel=tolerance)
    expected.backward()
    (total / weight).backward()
    assert_same_gradients(parameters, plain, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "return average + penalty", "return 1 - average", "return 2 * (penalty - average) / 3 + (1 - average)",
    "return F.mse_loss(y, t) + (torch.exp(-s[0]) * average + s[0])",
    "return (torch.exp(-s) * torch.stack([F.mse_loss(y, t), average]) + s).sum()",
])
@pytest.mark.parametrize("terms", [0, 3])
def test_what_is_added_to_an_average_that_is_kept_a_number(model_file: Callable[[str], str], line: str, terms: int) -> None:
    """Its terms may be none in a whole step: what is added stays."""
    line = "y, s, penalty = outputs; t, m = batch['target'], batch['labels'] > 0; " \
        "average = (y[:, 0] * m).sum() / m.sum().clamp(min=1); " + line
    source = load_model(model_file(LEARNED.format(line=line)), {}, None)
    graph = trace_model(source, sequence=None, dtype="float64")
    torch.manual_seed(0)
    model, plain = source.build().double(), source.build().double()
    plain.load_state_dict(model.state_dict())
    batch = {"features": torch.randn(6, 6).double(), "target": torch.randn(6, 5).double(), "labels": torch.arange(6) % 2}
    batch["labels"][terms * 2:] = 0
    assert source.loss is not None
    expected = source.loss(plain(batch["features"]), batch)
    parameters = dict(model.named_parameters())
    given = with_shares(graph, {name: batch[name] for name in batch if name in {each.name for each in graph.batch_inputs}})
    total, weight = run(graph, parameters, given)
    torch.testing.assert_close(total / weight, expected)
    expected.backward()
    (total / weight).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameters[name].grad, parameter.grad)


@pytest.mark.parametrize(("line", "said"), [
    ("return F.mse_loss(outputs, batch['target']) + (outputs ** 2).sum() / outputs.sum()", "weight depends on parameters"),
    ("return F.mse_loss(outputs, batch['target']) + outputs[:, 0].sum() / (outputs > 0).sum()", "weight depends on parameters"),
    ("return F.mse_loss(outputs, batch['target']) + outputs.sum() / batch['scale'].max()", "weight is no sum .*ends in max"),
    ("return 1 - F.mse_loss(outputs, batch['target']).sqrt()", "ends in sqrt"),
    ("m = batch['scale']; return (outputs[:, 0] * m).mean() / m.mean().clamp(min=1e-6)", "py:10: .*ends in clamp; leave it"),
    ("m = batch['scale']; return F.mse_loss(outputs, batch['target']) / m.sum()", "it divides what is no sum"),
    ("return F.mse_loss(outputs, batch['target']) / outputs.abs().mean().detach()", "weight depends on parameters"),
    ("m = batch['scale']; return outputs.abs().mean() / ((m * m).sum() / m.sum() + m.mean())", "divides by an average over a"),
    ("return outputs.max()", "ends in max"),
    ("return torch.lerp(F.mse_loss(outputs, batch['target']), outputs.abs().mean(), 0.3)", r"lerp; write \(1 - w\) \* a \+ w"),
    ("return torch.einsum('i,i->', torch.stack([outputs.abs().mean()]), torch.ones(1))", r"einsum; write \(a \* b\).sum\(\)"),
    ("return torch.dot(outputs[:, 0], batch['scale']) / batch['scale'].sum()", r"ends in dot; write \(a \* b\).sum\(\) for it"),
    ("return (torch.stack([F.mse_loss(outputs, batch['target'])]) ** 2).sum()", "a vector that ends in pow; .* every sam"),
    ("return torch.stack([outputs.mean(), outputs.square().mean()]).norm()", "take norm of every sample's"),
    ("m = batch['scale']; return (outputs[:, 0] * (m / m.sum())).sum()", r"divide the sum: \(l \* m\).sum\(\) / m.sum\(\)"),
    ("m = batch['scale']; return outputs.square().mean(1, keepdim=True).sum(0, keepdim=True).squeeze()", "without keepdim"),
    ("return F.mse_loss(outputs, batch['target']) * torch.full((), len(outputs))", "by a computed value|batch size"),
    ("return F.mse_loss(outputs, batch['target']) * batch['scale'].mean()", "ends in mul by a computed value"),
    ("return F.mse_loss(outputs, batch['target']) * torch.cat([batch['scale'].sum().view(1)]).view(())", "by a computed value"),
    ("return F.mse_loss(outputs, batch['target']) * F.dropout(batch['scale'].sum(), 0.5)", "by a computed value|for all"),
    ("return F.mse_loss(outputs, batch['target']).sqrt()", "ends in sqrt"),
    ("return outputs", "returned no scalar"),
    ("return (outputs ** 2).sum()", r"is a plain sum.*return \(loss_sum, weight\)"),
    ("return 0.5 * F.mse_loss(outputs, batch['target'], reduction='sum')", r"is a plain sum.*return \(loss_sum, weight\)"),
    ("return F.cross_entropy(outputs, batch['labels'], reduction='sum')", r"is a plain sum.*return \(loss_sum, weight\)"),
    ("return (outputs ** 2).mean(), batch['labels'].numel()", "the loss's sum is no sum over the batch: it ends in mean"),
    ("return (outputs ** 2).sum() + 1, batch['labels'].numel()", "the loss's sum is no sum over the batch: it ends in add"),
    ("return (outputs ** 2).sum(), batch['scale'].sum().clamp(min=1)", "ends in clamp; leave it out: a step divides by no"),
    ("return (outputs ** 2).sum() / batch['scale'].sum().clamp(min=1)", "ends in clamp; leave it out"),
    (MASKED + "m.sum().clamp(min=2)", "ends in clamp; leave it out"),
    (MASKED + "(m.sum() + 1)", "ends in add; leave it out"),
    ("return (outputs ** 2).sum() / outputs.shape[0], batch['labels'].numel()", "div computes with the batch size"),
    ("return (outputs ** 2).sum(), 7", "returned the number 7"),
    ("return F.mse_loss(outputs, batch['target']) + outputs.sum() / torch.tensor(3.0)", "is a plain sum"),
    ("return None", "returned 0 values"),
    ("return ((outputs - batch['target']) ** 2)[batch['labels'] > 0].mean()",
     r"py:10: the shape of what getitem returns depends on values; .*multiply by the mask, and divide by its sum"),
    ("return (outputs.masked_select(outputs > 0) ** 2).mean()", "py:10: the shape of what masked_select"),
    ("return outputs.sum(), outputs.sum()", "weight depends on parameters"),
    ("return F.cross_entropy(outputs, batch['labels'], weight=torch.rand(5))", "random"),
    ("return F.cross_entropy(outputs, batch['labels'], weight=batch['target'].mean(0).exp())", "py:10: .*reads a statistic"),
    ("w = batch['target'].mean(0).exp(); return F.cross_entropy(outputs, batch['labels'], w, reduction='sum'), len(outputs)",
     "py:10: cross_entropy_loss blends samples: it reads a statistic"),
    ("t = batch['target'].sigmoid(); return F.binary_cross_entropy_with_logits(outputs, t, pos_weight=1 / t.sum(0))",
     "py:10: binary_cross_entropy_with_logits blends samples: it reads a statistic"),
])
def test_refused(model_file: Callable[[str], str], line: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        trace_model(load_model(model_file(MODEL.format(line=line)), {}, None), sequence=None, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), [
    ("a = F.mse_loss(outputs, batch['target'])\n    return a.exp() + 1", "py:11: the loss does not decompose"),
    ("a = (outputs ** 2).mean()\n    return a, batch['labels'].numel()", "py:10: the loss's sum is no sum over the batch"),
    ("a = outputs.sum()\n    return outputs.sum(), a", "py:10: the loss's weight depends on parameters"),
    ("a = batch['target'].mean()\n    return a", "py:10: the loss depends on no trained parameter"),
    ("a = outputs[0].mean()\n    return 2 * a", "py:10: the loss averages over no dim of the batch"),
    ("a = outputs.square()\n    return a", "py:10: loss\\(\\) returned no scalar"),
    ("a = outputs.sum(0)\n    return outputs.sum(), a", "py:10: the loss's weight is no scalar"),
    ("a = F.mse_loss(outputs, batch['target']) / outputs.shape[0]\n    return a", "py:10: .*"),
])
def test_refusals_name_the_line(model_file: Callable[[str], str], line: str, said: str) -> None:
    """That of the operation, inside loss()."""
    with pytest.raises(ModelError, match=said):
        trace_model(load_model(model_file(MODEL.format(line=line)), {}, None), sequence=None, dtype="float32")


def test_the_default_loss_says_that_it_needs_labels(model_file: Callable[[str], str]) -> None:
    text = MODEL.format(line="").replace("def loss(outputs, batch):", "").replace('"labels"', '"classes"')
    said = r"the default loss needs labels; name them in example_inputs.*, or define loss\(outputs, batch\)"
    with pytest.raises(ModelError, match=said):
        trace_model(load_model(model_file(text), {}, None), dtype="float32")


def test_classifier_without_loss(model_file: Callable[[str], str]) -> None:
    text = MODEL.format(line="pass").replace("def loss(outputs, batch):\n    pass", "")
    graph = trace_model(load_model(model_file(text), {}, None), sequence=None, dtype="float32")
    assert {given.name: given.high for given in graph.batch_inputs}["labels"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("line", "terms"), [
    ("return ((outputs - batch['target']) ** 2).mean()", lambda x, y: (x - y) ** 2),
    ("return F.mse_loss(outputs, batch['target'])", lambda x, y: (x.float() - y.float()) ** 2),
    ("return 0.5 * F.l1_loss(outputs, batch['target'])", lambda x, y: 0.5 * (x - y).abs().float()),
    ("return F.l1_loss(outputs, batch['target']) + 3 * F.mse_loss(outputs[:, 0], batch['target'][:, 0])",
     lambda x, y: (x - y).abs().float().sum(-1) + 15 * (x[:, 0].float() - y[:, 0].float()) ** 2),
    ("return ((outputs - batch['target']) ** 2).sum(-1).sum() / batch['scale'].sum()", lambda x, y: ((x - y) ** 2).sum(-1)),
    ("return -F.nll_loss(outputs, batch['labels'], reduction='sum'), batch['scale'].sum()", lambda x, y: x[:, 1]),
    ("return (outputs.abs().sum() + 3 * outputs.abs().sum(0).sum()).to(outputs.dtype), batch['scale'].sum()",
     lambda x, y: 4 * x.abs().float()),
    ("return outputs.abs().sum().double(), batch['scale'].sum()", lambda x, y: x.abs()),
])
def test_half_precisions_are_summed_in_float32(
    model_file: Callable[[str], str], dtype: str, line: str, terms: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """3,000 samples: as a half the sum would be far off, or infinite."""
    half, samples = getattr(torch, dtype), 3000
    source = load_model(model_file(MODEL.format(line=line)), {}, None)
    graph = trace_model(source, sequence=None, dtype=dtype)
    torch.manual_seed(0)
    model = source.build().to(half)
    for bias in (model.a.bias, model.b.bias):
        torch.nn.init.zeros_(bias)  # The graph adds biases apart, which rounds once more.
    batch = {
        "features": 3 * torch.randn(samples, 6, dtype=half), "labels": torch.ones(samples, dtype=torch.int64),
        "target": 20 + torch.randn(samples, 5, dtype=half), "scale": torch.ones(samples, dtype=half),
    }
    batch = {given.name: batch[given.name].to(getattr(torch, given.type.dtype)) for given in graph.batch_inputs}
    total, weight = run(graph, dict(model.named_parameters()), batch)
    with torch.no_grad():
        expected = terms(model(batch["features"]), batch.get("target", torch.zeros(()))).double().sum()
    assert total.dtype in (torch.float32, torch.float64)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert weight.item() in (samples, 5 * samples)
    total.backward()
    assert all(p.grad is not None and p.grad.dtype == half for p in model.parameters())


OUTPUTS = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(40, 8), nn.Linear(8, 40)
    def forward(self, input_ids, targets=None):
        x = self.e(input_ids)
        return {returned}
{loss}
def make():
    return {made}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("returned", "loss", "made", "said"), [
    ("self.h(x[:, [-1]]), None", "", "M()",
     r"the model's output: has logits of one position, and labels are 8 a sample; .*define example_inputs.* and loss"),
    ("self.h(x)", "def loss(outputs, batch):\n    return {'loss': outputs.mean(), 'acc': outputs.max()}\n", "M()",
     r"user_model\.py:\d+: loss\(\) returned a dict of loss, acc; return one scalar to train on, or \(sum"),
    ("self.h(x + torch.autograd.grad(self.h(x).square().sum(), x, create_graph=True)[0])", "", "M()",
     r"is no parameter, no buffer and not traced; torch.autograd.grad and backward\(\) in forward cannot be traced"),
    ("self.h(x) * self.h.weight.data.sum()", "", "M()", r"not traced; .*; say \.detach\(\) for \.data"),
    ("{'logits': self.h(x), 'hidden': x}", "", "M()", ""), ("self.h(x)", "", "torch.compile(M())", ""),
])
def test_outputs_of_common_forms(model_file: Callable[[str], str], returned: str, loss: str, made: str, said: str) -> None:
    """nanoGPT's logits of the last position alone, where it is given no targets; a dict; a compiled module."""
    source = load_model(model_file(OUTPUTS.format(returned=returned, loss=loss, made=made)), {}, None)
    if said:
        with pytest.raises(ModelError, match=said):
            trace_model(source, sequence=8, dtype="float32")
    else:
        graph = trace_model(source, sequence=8, dtype="float32")
        assert [given.high for given in graph.batch_inputs] == [40, 40]
        assert {parameter.fqn.partition(".")[0] for parameter in graph.parameters} == {"e", "h"}


SPEECH = """
def example_inputs(batch, seq):
    return {"x": torch.zeros(batch, 12, 8), "labels": torch.randint(1, 9, (batch, 4)),
            "lengths": torch.full((batch,), 4), "steps": torch.full((batch,), 12)}

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 9)
    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

def make():
    return M()
"""


def torchs_ctc(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logarithms = outputs.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logarithms, batch["labels"], batch["steps"], batch["lengths"], reduction="sum")


@pytest.mark.slow
def test_ctc_is_refused_and_what_the_documents_advise_is_the_same(model_file: Callable[[str], str]) -> None:
    line = "F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), batch['labels'], batch['steps'], batch['lengths'])"
    spec = model_file(f"{SPEECH}\ndef loss(outputs, batch):\n    return {line}\n")
    with pytest.raises(ModelError, match=r"py:\d+: torch cannot trace ctc_loss, which looks at .*; sum over the alignments"):
        trace_model(load_model(spec, {}, None), sequence=None, dtype="float32")
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    found = re.search(r"```python\n(def ctc.*?)```", text, re.DOTALL)
    assert found is not None
    source = load_model(model_file(SPEECH + found[1]), {}, None)
    graph = trace_model(source, sequence=None, dtype="float32")
    torch.manual_seed(0)
    model = source.build()
    batch = {"x": torch.randn(3, 12, 8), "labels": torch.tensor([[1, 1, 2, 3], [4, 5, 0, 0], [8, 7, 8, 7]]),
             "lengths": torch.tensor([4, 2, 4]), "steps": torch.tensor([12, 7, 9])}
    total, weight = run(graph, dict(model.named_parameters()), batch)
    expected = torchs_ctc(model(batch["x"]), batch)
    torch.testing.assert_close(total, expected)
    assert weight == 10
    for ours, theirs in zip(*(torch.autograd.grad(each, list(model.parameters())) for each in (total, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
