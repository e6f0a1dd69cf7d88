"""No sample sees another: what makes them meet is refused with its line, what computes each by itself is not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.ir.types import BatchMultiple, TensorType
from planner.trace import load_model, trace_model
from planner.trace.order import PLAIN, Order, orders, reshaped, sliced

ModelFile = Callable[[str], str]
B = BatchMultiple(1)

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a, self.h = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        {has}
    def forward(self, input_ids):
        x = self.e(input_ids)
        b, s, d = x.shape
        x = x + self.a({value})
        return self.h(x)

def make():
    return Net()
"""

SEQ_FIRST = "nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)"


def traced(model_file: ModelFile, value: str, has: str = "pass", sequence: int = 8) -> ModelGraph:
    return trace_model(load_model(model_file(NET.format(value=value, has=has)), {}, None), sequence=sequence, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "said"), [
    ("x.roll(1, 0)", "roll works along dim 0, which holds the samples"),
    ("x.roll(1)", "roll works along dim 0"),
    ("x.flip(0)", "flip works along dim 0"),
    ("x.reshape(-1, 16).roll(1, 0).reshape(x.shape)", "roll works along dim 0"),
    ("x.cumsum(0)", "cumsum works along dim 0"),
    ("x.reshape(-1, 16).cumsum(0).reshape(x.shape)", "cumsum works along dim 0"),
    ("x.view(1, -1, 16).cumsum(1).view(x.shape)", "cumsum works along dim 1"),
    ("x.sort(0)[0]", "sort works along dim 0"),
    ("x.argsort(0).to(x.dtype)", "argsort works along dim 0"),
    ("x.flatten(0, 1).topk(4, dim=0)[0].mean() * x", "topk works along dim 0"),
    ("x.softmax(0)", "softmax works along dim 0"),
    ("x.transpose(0, 1).log_softmax(1).transpose(0, 1)", "softmax works along dim 1"),
    ("x.permute(1, 2, 0).softmax(-1).permute(2, 0, 1)", "softmax works along dim 2"),
    ("x.cummax(0)[0]", "cummax works along dim 0"),
    ("x * (x.mean((1, 2), True) >= x.mean())", "ge blends samples"),
    ("x * torch.pdist(x.flatten(1)).mean()", "pdist pairs every sample with every other"),
    ("x.logcumsumexp(0)", "logcumsumexp works along dim 0"),
    ("F.normalize(x, dim=0)", "blends samples"),
    ("torch.fft.fft(x, dim=0).real", "fft_fft works along dim 0"),
    ("F.layer_norm(x.permute(1, 2, 0), (b,)).permute(2, 0, 1)", "layer_norm works along dim 2"),
    ("F.group_norm(x.transpose(0, 1), 1).transpose(0, 1)", "group_norm works along dim 1"),
    ("F.conv1d(x.reshape(1, -1, 16).mT, x.new_ones(16, 16, 3), padding=1).mT.reshape(x.shape)", "conv1d works along dim 2"),
    ("F.max_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1)", "max_pool2d works along dim 3"),
    ("F.avg_pool2d(x.permute(1, 2, 0)[None], 3, 1, 1)[0].permute(2, 0, 1)", "avg_pool2d works along dim 3"),
    ("F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1)", "attention adds up over dim 1"),
    ("torch.tril(x.permute(1, 2, 0)).permute(2, 0, 1)", "tril works along dim 2"),
    ("x * torch.outer(x[:, 0, 0], x[:, 1, 0]).amax(1).view(-1, 1, 1)", "pairs every sample with every other"),
    ("x * (x.flatten(1) @ x.flatten(1).T).amax(1).view(-1, 1, 1)", "matmul pairs every sample with every other"),
    ("torch.einsum('bsd,csd->bcs', x, x).sum(1).unsqueeze(2) * x", "pairs every sample with every other"),
    ("torch.cdist(x.flatten(1), x.flatten(1)).amin(1).view(-1, 1, 1) * x", "pairs every sample with every other"),
    ("x.unsqueeze(1).expand(b, b, s, d).amax(1)", "pairs every sample with every other"),
    ("(torch.ones(b, b) @ x.flatten(1)).view(x.shape)", "adds up over dim 0"),
    ("torch.cat([x, x + 1], 0)[::2]", "slice takes a part of dim 0, which holds the samples as 2 x B"),
    ("x.repeat(2, 1, 1)[1::2]", "slice takes a part of dim 0"),
    ("x.view(-1, 16)[:b].unsqueeze(1)", "slice takes a part of dim 0, which holds the samples as B x 8"),
    ("torch.stack([x, 2 * x], 1).flatten(0, 1)[b:]", "slice takes a part of dim 0, which holds the samples as B x 2"),
    ("x.reshape(8, -1, 16).transpose(0, 1)", r"reshape from \[B, 8, 16\] to \[8, B, 16\] cuts through samples"),
    ("(x.flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)).view(x.shape)", r"\[8, B, 16\] to \[B, 8, 16\] cuts through"),
    ("x[torch.zeros(b, dtype=torch.long)]", "index reads other samples along dim 0"),
    ("x.index_select(0, torch.arange(b).flip(0))", "index_select reads other samples along dim 0"),
    ("x.gather(0, torch.zeros_like(x, dtype=torch.long))", "gather reads other samples along dim 0"),
    ("x.flatten(0, 1)[torch.arange(b)].unsqueeze(1)", "index reads other samples along dim 0"),
    ("x.index_add(0, torch.zeros(b, dtype=torch.long), x)", "index_add writes into other samples along dim 0"),
    ("torch.zeros_like(x).scatter_add(0, torch.zeros_like(x, dtype=torch.long), x)", "scatter_add writes into other samples"),
    ("x[torch.arange(b - 1, -1, -1)]", "the number 1000002 in arange is computed from the number of samples"),
    ("F.pad(x, (0, 0, 0, 0, 1, 0))[:-1]", "pad works along dim 0"),
    ("x[:b // 2].repeat(2, 1, 1)[:1] + x", "the number 500001 in __getitem__ is computed from the number of samples"),
    ("x * (torch.arange(b) / 100).view(-1, 1, 1)", "mul computes with a sample's place in the batch"),
    ("x.masked_fill((torch.arange(b) > 1)[:, None, None], 0)", "masked_fill computes with a sample's place in the batch"),
    ("x + self.e(torch.arange(b)).unsqueeze(1)", "embedding reads by a sample's place in the batch"),
    ("torch.select_scatter(x, torch.zeros(s, d), 0, 0)", "select_scatter works along dim 0"),
    ("torch.slice_scatter(x, torch.zeros(1, s, d), 0, 0, 1)", "slice_scatter works along dim 0"),
    ("x * torch.select_scatter(torch.ones(b, 1, 1), torch.zeros(1, 1), 0, 0)", "mul computes with a sample's place"),
    ("torch.linalg.qr(x.permute(1, 2, 0))[1].sum((1, 2)).view(1, s, 1) * x", "blends samples|linalg_qr works along dim 2"),
    ("torch.where(torch.arange(b).view(-1, 1, 1) % 2 == 0, x, 0.0)", "where computes with a sample's place in the batch"),
    ("x * torch.linspace(0, 1, b).view(-1, 1, 1)", "mul computes with a sample's place"),
    ("x * torch.ones(b).cumsum(0).view(-1, 1, 1)", "mul computes with a sample's place"),
    ("x * torch.ones(b).sum()", "mul computes with a sample's place in the batch, or with their number"),
    ("x / (1 + (torch.rand(b, 1) < 0.5).sum())", "div blends samples: it reads a statistic over the batch"),
    ("x / (input_ids == 3).sum()", "div blends samples: it reads a statistic over the batch"),
    ("x * (input_ids == 3).sum().float().sqrt()", "mul blends samples"),
    ("x * (1 / (1 + F.one_hot(input_ids, 40).sum((0, 1))))[input_ids].unsqueeze(2)", "index blends samples"),
    ("x * F.one_hot(input_ids, 40).sum((0, 1))[input_ids].unsqueeze(2)", "mul blends samples"),
])
def test_samples_that_meet(model_file: ModelFile, value: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as raised:
        traced(model_file, value)
    assert re.search(r"user_model.py:13$", raised.value.where), str(raised.value)
    assert "\n" not in str(raised.value) and raised.value.right


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "pool"), [("sum", "sum"), ("mean", "mean"), ("max", "amax")])
def test_bags_make_their_own_offsets(model_file: ModelFile, mode: str, pool: str) -> None:
    """nn.EmbeddingBag of ids [batch, n] flattens them: the message says how the same is written sample by sample."""
    with pytest.raises(ModelError, match=rf"offsets, which nn.EmbeddingBag makes.*nn.Embedding\(...\)\(ids\).{pool}\(1\)"):
        traced(model_file, "x + self.n(x[..., 0].long()).unsqueeze(1)", f"self.n = nn.EmbeddingBag(50, 16, mode={mode!r})")
    traced(model_file, f"x + self.n(x[..., 0].long()).{pool}(1).unsqueeze(1)", "self.n = nn.Embedding(50, 16)")


@pytest.mark.parametrize("layer", ["GRU", "LSTM", "RNN"])
def test_samples_as_time_steps(model_file: ModelFile, layer: str) -> None:
    """A slip that would run a million steps first."""
    with pytest.raises(ModelError, match="takes the samples for time steps; give it batch_first=True"):
        traced(model_file, "self.n(x)[0]", f"self.n = nn.{layer}(16, 16)")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "has"), [
    ("x.reshape(-1, 16).softmax(-1).reshape(b, s, d)", ""),
    ("x.transpose(0, 1).flip(0).cumsum(0).transpose(0, 1)", ""),
    ("x.transpose(0, 1).flatten(0, 1).view(s, b, d).transpose(0, 1)", ""),
    ("self.n(x.transpose(0, 1)).transpose(0, 1)", f"self.n = {SEQ_FIRST}"),
    ("self.n(x)", f"self.n = {SEQ_FIRST[:-1]}, batch_first=True)"),
    ("x.transpose(0, 1).reshape(s, b * 4, 4).transpose(0, 1).softmax(1).transpose(0, 1).reshape(s, b, d).transpose(0, 1)", ""),
    ("self.n(x)[0]", "self.n = nn.LSTM(16, 16, batch_first=True)"),
    ("self.n(x.transpose(0, 1))[0].transpose(0, 1)", "self.n = nn.GRU(16, 16)"),
    ("torch.stack([self.n(t) for t in x.unbind(1)], 1)", "self.n = nn.Linear(16, 16)"),
    ("self.n(x.mT).mT", "self.n = nn.Conv1d(16, 16, 3, padding=1)"),
    ("F.max_pool1d(x.mT, 3, 1, 1).mT", ""),
    ("F.group_norm(x.mT, 4).mT", ""),
    ("self.n(x.mT).mT", "self.n = nn.InstanceNorm1d(16)"),
    ("self.n(x.mT).mT", "self.n = nn.BatchNorm1d(16).eval(); self.n.train = lambda mode=True: self.n"),
    ("F.conv1d(x.mT.reshape(1, -1, s), x[:, :3].mT.unsqueeze(1).repeat(1, 16, 1, 1).flatten(0, 1), padding=1, groups=b)"
     ".view(b, d, s).mT", ""),
    ("torch.cat([x, x + 1], 0)[b:]", ""),
    ("sum(torch.cat([x, x + 1], 0).chunk(2))", ""),
    ("torch.stack([x, 2 * x], 1).flatten(0, 1)[::2]", ""),
    ("x.repeat_interleave(2, 0).view(b, 2, s, d).sum(1)", ""),
    ("x.repeat(2, 1, 1).view(2, b, s, d).sum(0)", ""),
    ("x.gather(1, input_ids.unsqueeze(2).expand_as(x) % s)", ""),
    ("x[torch.arange(b).unsqueeze(1), input_ids % s]", ""),
    ("x.flatten(0, 1)[torch.arange(b).unsqueeze(1) * s + input_ids % s]", ""),
    ("x.flatten(0, 1)[torch.arange(b * s) // s * s].view(x.shape)", ""),
    ("x.index_select(0, torch.arange(b))", ""),
    ("torch.zeros_like(x).index_add(0, torch.arange(b), x)", ""),
    ("torch.zeros_like(x).scatter_add(1, input_ids.unsqueeze(2).expand_as(x) % s, x)", ""),
    ("x + self.e(torch.arange(s).expand(b, s))", ""),
    ("x + self.e(torch.arange(b * s) % s).view(x.shape)", ""),
    ("x * (torch.arange(b * s) % s).view(b, s, 1)", ""),
    ("(x.flatten(0, 1) * (torch.arange(b * s) % s).unsqueeze(1)).view(x.shape)", ""),
    ("x * torch.ones(b, s, 1) + torch.zeros(b, 1, d)", ""),
    ("x.masked_fill((input_ids == 3).unsqueeze(2), 0.0)", ""),
    ("F.scaled_dot_product_attention(x, x, x, (input_ids != 3).unsqueeze(1) & torch.ones(s, s, dtype=torch.bool).tril())", ""),
    ("F.scaled_dot_product_attention(x.sum(1), self.n, self.n).unsqueeze(1)", "self.n = nn.Parameter(torch.ones(5, 16))"),
    ("torch.einsum('bsd,btd,bte->bse', x, x, x)", ""),
    ("torch.linalg.inv(torch.eye(16) + x.mT @ x).flatten(1).unsqueeze(1)[..., :16]", ""),
    ("torch.fft.fft2(x).real", ""),
    ("torch.select_scatter(x, x[:, 0] * 2, 1, 3)", ""),
    ("torch.slice_scatter(torch.zeros(2 * b, s, d), x, 0, 0, b).slice_scatter(2 * x, 0, b).view(2, b, s, d).sum(0)", ""),
    ("x.view(b, 2, 4, d).transpose(1, 2).reshape(-1, 2, d).softmax(1).view(b, 4, 2, d).transpose(1, 2).reshape(x.shape)", ""),
])
def test_samples_by_themselves(model_file: ModelFile, value: str, has: str) -> None:
    assert traced(model_file, value, has or "pass").blocks


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [260_000, 1_500_001, 10**9])
@pytest.mark.parametrize("value", [
    "x.flatten(0, 1).softmax(-1).view(x.shape)",
    "x.transpose(0, 1).flatten(0, 1).view(s, b, d).transpose(0, 1)",
    "torch.cat([x.flatten(0, 1), x.flatten(0, 1)])[:b * s].view(x.shape)",
])
def test_samples_as_long_as_pairs_would_be(model_file: ModelFile, value: str, sequence: int) -> None:
    """Tokens of all samples in one dim are more than the pairs that the traced batch has for every sample."""
    assert traced(model_file, value, sequence=sequence).blocks


@pytest.mark.slow
@pytest.mark.parametrize("value", [
    "x * torch.pdist(x.flatten(1)).mean()",
    "x * x[:, 0].repeat(b, 1).mean()",
    "x * x.flatten(1)[torch.triu_indices(b, b, 1)[0], :4].mean()",
    "x * x.flatten(0, 1)[torch.triu_indices(b, b, 1)[0]].mean()",
])
def test_long_samples_that_meet(model_file: ModelFile, value: str) -> None:
    with pytest.raises(ModelError, match="pairs every sample with every other"):
        traced(model_file, value, sequence=600_000)


ROUTED = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.gate, self.h = nn.Embedding(40, 16), nn.Linear(16, 4), nn.Linear(16, 40)
        self.w = nn.Parameter(torch.randn(4, 16, 16))
    def forward(self, input_ids):
        x = self.e(input_ids)
        rows = x.flatten(0, 1)
        scores, experts = self.gate(rows).softmax(-1).topk(2, dim=-1)
        {body}
        return self.h(x + y.view(x.shape))

def make():
    return Mixture()
"""

ONE_HOT = """hot = F.one_hot(experts, 4).sum(1).to(x.dtype)
        y = torch.einsum('te,td,edf->tf', hot, rows, self.w)"""
CAPACITY = """hot = F.one_hot(experts[:, 0], 4)
        kept = (hot.cumsum(0) * hot <= 6) * hot
        y = torch.einsum('te,td,edf->tf', kept.to(x.dtype), rows, self.w)"""
SORTED = """flat = experts.flatten()
        order = flat.argsort()
        tokens = torch.arange(len(rows)).repeat_interleave(2)[order]
        found = torch.bmm(rows[tokens].unsqueeze(1), self.w[flat[order]]).squeeze(1) * scores.flatten()[order].unsqueeze(1)
        y = torch.zeros_like(rows).index_add(0, tokens, found)"""
BACK = """flat = experts.flatten()
        chosen, order = flat.sort()
        found = torch.bmm(rows[order // 2].unsqueeze(1), self.w[chosen]).squeeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        y = (found[back] * scores.flatten().unsqueeze(1)).view(-1, 2, 16).sum(1)"""
PLACED = """y = torch.zeros_like(rows)
        for at in range(2):
            y = y.index_add(0, torch.arange(len(rows)), rows * scores[:, at:at + 1])"""
BY_TOKENS = """best, which = self.gate(rows).softmax(-1).T.topk(4, dim=1)
        y = torch.zeros_like(rows).index_add(0, which.flatten(), rows[which.flatten()])"""


@pytest.mark.slow
@pytest.mark.parametrize("body", [ONE_HOT, SORTED, BACK, PLACED], ids=["one-hot", "sorted", "brought-back", "placed"])
def test_a_mixture_of_experts_routes_tokens_by_themselves(model_file: ModelFile, body: str) -> None:
    source = load_model(model_file(ROUTED.format(body=body)), {}, None)
    assert trace_model(source, sequence=8, dtype="float32").blocks


@pytest.mark.slow
@pytest.mark.parametrize(("body", "said"), [
    (CAPACITY, "le computes with numbers counted or sorted over the samples"),
    (CAPACITY.replace("hot.cumsum", "hot.float().cumsum"), "cumsum works along dim 0"),
    (BY_TOKENS, "topk works along dim 1"),
], ids=["counted", "counted-in-floats", "chosen-by-experts"])
def test_experts_that_hold_so_many_tokens(model_file: ModelFile, body: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        trace_model(load_model(model_file(ROUTED.format(body=body)), {}, None), sequence=8, dtype="float32")


LOSS = """
def loss(outputs, batch):
    b, labels = len(outputs), batch["labels"]
    {line}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), [
    ("z = F.normalize(outputs.mean(1), dim=-1); return F.cross_entropy(z @ z.T, torch.arange(b))", "matmul pairs every sample"),
    ("return F.cross_entropy(outputs.transpose(0, 1).flatten(0, 1), labels.flatten())", "reads samples in two orders"),
    ("return F.cross_entropy(outputs.mean(1), torch.arange(b))", "computes with a sample's place"),
    ("return F.mse_loss(outputs, outputs.detach().roll(1, 0))", "roll works along dim 0"),
    ("return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())", ""),
    ("return F.cross_entropy(outputs.transpose(1, 2), labels)", ""),
    ("return F.cross_entropy(outputs.transpose(0, 1).flatten(0, 1), labels.T.flatten())", ""),
    ("return torch.cat([outputs.pow(2).flatten(), outputs.abs().flatten()]).mean()", ""),
    ("return outputs.mean(1).pow(2).mean()", ""),
    ("return outputs.pow(2).mean((1, 2)).sum(), torch.ones(b).sum()", ""),
])
def test_losses(model_file: ModelFile, line: str, said: str) -> None:
    source = load_model(model_file(NET.format(value="x", has="pass") + LOSS.format(line=line)), {}, None)
    if not said:
        assert trace_model(source, sequence=8, dtype="float32").blocks
        return
    with pytest.raises(ModelError, match=said):
        trace_model(source, sequence=8, dtype="float32")


@pytest.mark.parametrize(("order", "before", "after", "expected"), [
    (PLAIN, (B, 8, 4), (BatchMultiple(8), 4), Order(1, 8)),
    (Order(1, 8), (BatchMultiple(8), 4), (B, 8, 4), PLAIN),
    (PLAIN, (8, B, 4), (BatchMultiple(8), 4), Order(8, 1)),
    (PLAIN, (8, B, 4), (8, BatchMultiple(2), 2), Order(1, 2)),
    (Order(8, 1), (BatchMultiple(8), 4), (2, BatchMultiple(4), 4), Order(4, 1)),
    (Order(1, 8), (BatchMultiple(8), 4), (BatchMultiple(2), 16), Order(1, 2)),
    (PLAIN, (B, 8, 4), (8, B, 4), None),
    (Order(8, 1), (BatchMultiple(8), 4), (B, 8, 4), None),
    (PLAIN, (8, B, 4), (BatchMultiple(4), 8), None),
])
def test_views_of_an_order(order: Order, before: tuple[object, ...], after: tuple[object, ...], expected: Order | None) -> None:
    given = [TensorType(shape, "float32") for shape in (before, after)]  # type: ignore[arg-type]
    assert reshaped(order, *given) == expected


def test_parts_of_an_order() -> None:
    whole = BatchMultiple(6)
    assert sliced(Order(3, 2), 0, whole, 1) == Order(3, 2)
    assert sliced(Order(3, 2), BatchMultiple(2), whole, 1) == Order(2, 2)
    assert sliced(Order(3, 2), BatchMultiple(1), BatchMultiple(3), 1) is None
    assert sliced(Order(3, 2), 1, whole, 2) == Order(3, 1)
    assert sliced(Order(2, 3), 0, whole, 2) is None
    assert sliced(Order(3, 2), 1, whole, 1) is None


def test_orders() -> None:
    assert [*orders(6)] == [Order(6, 1), Order(3, 2), Order(2, 3), Order(1, 6)]


def test_gradients_divided_by_how_often_a_call_has_an_id(model_file: ModelFile) -> None:
    """Refused of what is trained: a frozen table has no gradients."""
    said = r"user_model\.py:\d+: embedding divides its gradients by how often a call has each id .*; leave it out$"
    with pytest.raises(ModelError, match=said):
        traced(model_file, "self.t(input_ids)", has="self.t = nn.Embedding(40, 16, scale_grad_by_freq=True)")
    graph = traced(model_file, "F.embedding(input_ids, self.e.weight.detach(), scale_grad_by_freq=True)")
    lookups = [node for body in graph.bodies for node in body.nodes if node.base == "embedding"]
    assert len(lookups) == 2 and not any(node.argument("scale_grad_by_freq") for node in lookups)
