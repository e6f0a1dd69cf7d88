"""The example models with sizes that are pairwise different, random norms and non-zero biases: no two dims can be mistaken
for each other, and no parameter's gradient hides behind a zero or a one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _scrambled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.7, 0.3)
        else:
            nn.init.normal_(parameter, 0.0, 0.15)
    return model


def gpt(layers: int = 6, seq: int = 20, dropout: float = 0.0, tied: bool = True) -> nn.Module:
    """Heads (6) and vocabulary (51) do not divide by four; tied embedding and head; fused QKV."""
    return _scrambled(_example("gpt").gpt(
        layers=layers, hidden=30, heads=6, ffn_hidden=46, vocab=51, seq=seq, dropout=dropout, tied=tied,
    ))


def untied_gpt(seq: int = 20) -> nn.Module:
    """The same, shallower, with a head of its own."""
    return gpt(layers=2, seq=seq, tied=False)


def llama(layers: int = 6, seq: int = 24) -> nn.Module:
    """Grouped queries (10 heads on 5), both uneven over two and four; ffn 37, vocabulary 53."""
    return _scrambled(_example("llama").llama(
        layers=layers, hidden=28, heads=10, kv_heads=5, head_dim=6, ffn_hidden=37, vocab=53, seq=seq,
    ))


class _Q(nn.Module):
    """A transformer layer in which no name means anything."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()
        self.z1, self.z2, self.b = nn.LayerNorm(a), nn.LayerNorm(a), b
        self.k0, self.k1, self.k2 = (nn.Linear(a, a) for _ in range(3))
        self.k3, self.k4, self.k5 = nn.Linear(a, a), nn.Linear(a, c), nn.Linear(c, a)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        w, v, _ = u.shape
        g = self.z1(u)
        r, s, t = (m(g).reshape(w, v, self.b, -1).transpose(1, 2) for m in (self.k0, self.k1, self.k2))
        g = f.scaled_dot_product_attention(r, s, t, is_causal=True).transpose(1, 2).reshape(w, v, -1)
        u = u + self.k3(g)
        return u + self.k5(f.gelu(self.k4(self.z2(u))))


class _P(nn.Module):
    def __init__(self, n: int, a: int, b: int, c: int, d: int) -> None:
        super().__init__()
        self.i = nn.Embedding(d, a)
        self.j = nn.ModuleList(_Q(a, b, c) for _ in range(n))
        self.l = nn.Linear(a, d, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        u = self.i(input_ids)
        for q in self.j:
            u = q(u)
        return self.l(u)


def nameless() -> nn.Module:
    """Modules and variables with meaningless names."""
    return _scrambled(_P(6, 30, 6, 46, 51))


class _Buffered(nn.Module):
    """A layer with buffers of every kind: a causal mask that becomes a flag, tables that are read, others that are not."""

    def __init__(self, hidden: int, heads: int, seq: int, table: torch.Tensor) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(hidden)
        self.mixing, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.register_buffer("mask", torch.ones(seq, seq, dtype=torch.bool).tril())
        self.register_buffer("gains", torch.linspace(0.5, 1.5, hidden))
        self.register_buffer("table", table)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("secret", torch.linspace(0.9, 1.1, hidden), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        parts = self.mixing(self.norm(x) * self.gains + self.table[:seq]).reshape(batch, seq, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask[:seq, :seq])
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden)) * self.secret


class _WithBuffers(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        table = torch.outer(torch.arange(seq), torch.linspace(0.1, 1.0, hidden)).sin()
        self.tokens, self.seq = nn.Embedding(vocab, hidden), seq
        self.layers = nn.ModuleList(_Buffered(hidden, heads, seq, table) for _ in range(layers))
        self.head, self.unused = nn.Linear(hidden, vocab, bias=False), nn.Linear(3, 2)
        self.register_buffer("offsets", torch.randn(hidden))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.offsets
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def buffered(layers: int = 3, seq: int = 20) -> nn.Module:
    """Persistent buffers that blocks read, that are folded, that nothing reads, that layers share; an idle parameter."""
    return _scrambled(_WithBuffers(layers, 30, 6, 51, seq))


class _Corner(nn.Module):
    """A gated residual: its gates are parameters without dims."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(hidden), nn.Parameter(torch.tensor(0.3))
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Corners(nn.Module):
    def __init__(self, layers: int, hidden: int, vocab: int, kinds: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden, padding_idx=4)
        self.kinds, self.temperature = nn.Embedding(kinds, hidden), nn.Parameter(torch.tensor(1.2))
        self.layers = nn.ModuleList(_Corner(hidden, 46) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("ids", torch.arange(seq) % kinds, persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.kinds(self.ids[: input_ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.temperature


def corners(vocab: int = 51) -> nn.Module:
    """A padding row, a table of fewer rows than ranks, parameters without dims."""
    model = _Corners(3, 30, vocab, 2, 24)
    for name, parameter in model.named_parameters():
        if parameter.dim():
            nn.init.normal_(parameter, 0.7 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.15)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def frozen() -> nn.Module:
    """The same, of which the first blocks are not trained: a first stage without gradients."""
    model = corners()
    for module in (model.tokens, model.kinds, model.layers[0]):
        module.requires_grad_(False)
    return model


class _Mixer(nn.Module):
    """A causal convolution over time and a norm over groups, gated by what was summed so far; a tuple in, a tuple out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(hidden, hidden, 3, groups=2), nn.GroupNorm(5, hidden)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = state
        y = self.conv(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2) * torch.sigmoid(total)
        y = self.norm(y.reshape(-1, y.shape[-1])).reshape(y.shape)
        return x + nn.functional.silu(y), total + y


class _Windowed(nn.Module):
    """A Sequential inside; passes its second value on untouched."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden, bias=False))
        self.register_buffer("window", torch.hann_window(hidden, periodic=False))

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = state
        return x + self.inner(x * self.window), total


class _Odd(nn.Module):
    def __init__(self, pairs: int, hidden: int, ffn: int, vocab: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, hidden)
        self.body = nn.Sequential(*(m for _ in range(pairs) for m in (_Mixer(hidden), _Windowed(hidden, ffn))))
        self.last, self.fold = nn.LayerNorm(2 * hidden), nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, vocab, bias=False)
        self.out.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        x, total = self.body((x, torch.zeros_like(x)))
        return self.out(self.fold(self.last(torch.cat([x, total], dim=-1))))


def odd() -> nn.Module:
    """A Sequential of two kinds in turns, tuples between them, of which the second value begins without a gradient."""
    return _scrambled(_Odd(3, 30, 46, 51))


class Average(nn.Module):
    """Mixes a position with those before it; how many those are is a view of a tensor that nothing else reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + self.down(torch.tanh(self.up(torch.cumsum(x, dim=1) / places)))


class Decay(nn.Module):
    """A decaying mean after a convolution; the decay is learned, and on two ways to the result: one leads to the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * width)
        self.mix = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.out = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, gate = self.into(x).chunk(2, -1)
        mixed = F.silu(self.mix(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay = torch.exp(-F.softplus(self.decay))
        mean = torch.cumsum(mixed * decay, 1) / (1 + torch.cumsum(torch.ones_like(mixed) * decay, 1))
        return x + self.out(mean * F.silu(gate))


class Stacked(nn.Module):
    """An embedding, layers, a head."""

    def __init__(self, layers: Iterable[nn.Module], width: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def averages(layers: int = 6, width: int = 16, vocab: int = 64) -> Stacked:
    return Stacked((Average(width) for _ in range(layers)), width, vocab)


def adapted(layers: int = 6, width: int = 16, vocab: int = 64) -> Stacked:
    """Frozen up to the third layer; from there on one bias of a layer is trained beside matrices that are not, and the head."""
    model = averages(layers, width, vocab)
    model.requires_grad_(False)
    for name in ("head.weight", *(f"layers.{index}.down.bias" for index in range(2, layers))):
        model.get_parameter(name).requires_grad_(True)
    return model


def decays(layers: int = 4, width: int = 16, vocab: int = 64) -> Stacked:
    return Stacked((Decay(width) for _ in range(layers)), width, vocab)


class Turned(nn.Module):
    """Mixes positions through a turned view, turns pairs of features as complex numbers by a table, multiplies three tensors at
    once, writes into a part of a copy, and ends in a value that it keeps itself."""

    def __init__(self, width: int, seq: int, table: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(seq, seq)
        self.narrow = nn.Parameter(torch.randn(width, 4) / width**0.5)
        self.wide = nn.Parameter(torch.randn(4, width) / 2)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        x = x + self.mix(self.norm(x).mT).mT
        pairs = torch.view_as_complex(x.reshape(batch, seq, width // 2, 2)) * self.table[:seq]
        turned = torch.view_as_real(pairs).flatten(2)
        product = torch.einsum("...d,dr,re->...e", turned, self.narrow, self.wide)
        product[:, 0] = x[:, 0]
        return F.relu(self.scale(product) + x)


def turned(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stacked:
    angles = torch.outer(torch.arange(2 * seq), 0.5 ** torch.arange(width // 2)).to(torch.get_default_dtype())
    table = torch.polar(torch.ones_like(angles), angles)
    return Stacked((Turned(width, seq, table) for _ in range(layers)), width, vocab)


class Sideways(nn.Module):
    """Mixes positions and nothing else: what it returns, and the gradient of what it is given, lie column by column."""

    def __init__(self, seq: int) -> None:
        super().__init__()
        self.mix = nn.Linear(seq, seq)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x.mT)).mT


def sideways(layers: int = 6, width: int = 16, vocab: int = 64, seq: int = 24) -> Stacked:
    return Stacked((Sideways(seq) for _ in range(layers)), width, vocab)


class Attended(nn.Module):
    """Attention to all but the first key; half of a key is made of one part of a split, half is the other part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.up, self.value = nn.Linear(width // 2, width // 2), nn.Linear(width // 2, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        low, straight = self.down(x).chunk(2, -1)
        keys = torch.cat([self.up(low), straight], -1)
        weights = (self.query(x) @ keys.mT / x.shape[-1] ** 0.5 + bias).softmax(-1)
        values = self.value(low)
        return torch.einsum("bqk,bkd->bqd", weights[..., 1:], values[:, 1:]) + values


class Twice(nn.Module):
    """Two attentions, the second of what the first makes, under one mask that a learned slope gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Attended(width), Attended(width)
        self.slope = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        distance = places[:, None] - places
        bias = torch.where(distance >= 0, -self.slope * distance, -1e4)
        x = x + self.first(x, bias)
        return x + self.second(x, bias)


def twice(layers: int = 4, width: int = 16, vocab: int = 64) -> Stacked:
    return Stacked((Twice(width) for _ in range(layers)), width, vocab)


class Scaled(nn.Module):
    """Attention and a feed-forward network side by side, then the network once more; one norm and one scale for all."""

    def __init__(self) -> None:
        super().__init__()
        parts = _example("gpt")
        self.norm, self.scale = nn.LayerNorm(30), nn.Parameter(torch.ones(30))
        self.attention, self.feed_forward = parts.Attention(30, 6, 0.0, True), parts.FeedForward(30, 46, True, "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.scale * (self.attention(h) + self.feed_forward(h))
        return x + self.scale * self.feed_forward(self.norm(x))


class ScaledHead(Stacked):
    """The head reads the last layer's scale."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + self.layers[-1].scale.mean())


def scaled(layers: int = 4) -> nn.Module:
    return _scrambled(ScaledHead((Scaled() for _ in range(layers)), 30, 52))


class Experts(nn.Module):
    """Each token goes through the two best of its experts, whose products are one grouped product."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.router = count, nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        ends = torch.histc(expert.float(), self.count, 0, self.count - 1).cumsum(0).to(torch.int32)
        hidden = F.gelu(_grouped_product(tokens[order // 2], self.up, ends))
        made = _grouped_product(hidden, self.down.transpose(1, 2), ends) * weights.flatten()[order][:, None]
        back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
        return x + made[back].unflatten(0, (-1, 2)).sum(1).view_as(x)


def _grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``F.grouped_mm``; in types that torch's fake tensors refuse, each expert's product of all rows, and of them its own."""
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    own = torch.arange(rows.shape[0], device=rows.device)[:, None] < ends
    first = own & ~F.pad(own, (1, 0))[:, :-1]
    return torch.einsum("rg,rk,gkn->rn", first.to(rows.dtype), rows, weights)


def experts(layers: int = 4, width: int = 16, vocab: int = 64) -> Stacked:
    return Stacked((Experts(width, 4) for _ in range(layers)), width, vocab)


class SoftExperts(nn.Module):
    """Each token goes through all experts, which have a bias of their own."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(count, 2 * width))
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up) + self.bias)
        made = torch.einsum("bteh,ehd->bted", hidden, self.down)
        return x + torch.einsum("bted,bte->btd", made, self.router(x).softmax(-1))


def soft_experts(layers: int = 4, width: int = 16, vocab: int = 64) -> Stacked:
    return Stacked((SoftExperts(width, 5) for _ in range(layers)), width, vocab)


class Reader(nn.Module):
    """A layer of a decoder: reads what an encoder made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.read, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        scores = self.own(x) @ self.read(memory).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + self.out(torch.tanh(scores.softmax(-1) @ memory))


class Translator(nn.Module):
    """An encoder of averages, and a decoder with an embedding of its own: gradients begin in two places."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(Average(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Reader(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.source(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(tokens)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Reading(Stacked):
    """What every layer reads goes through all stages as it is."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.embedding(tokens)
        x = torch.tanh(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


def reading(layers: int = 6, width: int = 16, vocab: int = 64) -> Reading:
    return Reading((Reader(width) for _ in range(layers)), width, vocab)


def translator(layers: int = 3, width: int = 16, vocab: int = 64) -> Translator:
    return Translator(layers, width, vocab)


class Mirrored(Stacked):
    """One table embeds the tokens and those from the other end, and is the head."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.embedding(tokens.flip(1))
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embedding.weight)


def mirrored(layers: int = 4, width: int = 16, vocab: int = 64) -> Mirrored:
    model = Mirrored((Average(width) for _ in range(layers)), width, vocab)
    model.head.weight = model.embedding.weight
    return model


class Mixing(nn.Module):
    """A learned matrix mixes positions from the left, attention has a learned bias, and a transform mixes positions."""

    def __init__(self, width: int, seq: int, heads: int = 2) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(seq, seq))
        self.bias = nn.Parameter(torch.zeros(heads, seq, seq))
        self.query, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, _, length = self.bias.shape
        x = x + self.mix @ torch.tanh(self.up(x))
        query = self.query(x).view(x.shape[0], length, heads, -1).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(query, query, query, attn_mask=self.bias).transpose(1, 2).flatten(2)
        return x + self.down(torch.fft.fft(x, dim=1).real)


def mixing(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stacked:
    return Stacked((Mixing(width, seq) for _ in range(layers)), width, vocab)


class Looped(Stacked):
    """The same layers again and again."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            for layer in self.layers:
                x = layer(x)
        return F.linear(x, self.embedding.weight)


def looped(width: int = 16, vocab: int = 64, *, bias: bool = True) -> Looped:
    layer = Average(width)
    if not bias:
        layer.up.bias = layer.down.bias = None
    model = Looped([layer], width, vocab)
    model.head.weight = model.embedding.weight
    return model


class Unrolled(nn.Module):
    """A recurrence written step by step: most steps are in one block, the last one's products in others."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.inward, self.onward = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        states = [torch.zeros_like(x[:, 0])]
        for at in range(x.shape[1]):
            states.append(torch.tanh(self.inward(x[:, at]) + self.onward(states[-1])))
        return self.head(torch.stack(states[1:], 1))


def unrolled(width: int = 256, vocab: int = 16) -> Unrolled:
    return Unrolled(width, vocab)


class Paired(Stacked):
    """All layers run twice, on a sequence and on the same turned around, and a head without parameters compares the two
    (siamese nets, preferences between two answers)."""

    def once(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.once(tokens)) - self.head(self.once(tokens.flip(1)))


def paired(layers: int = 3, width: int = 16, vocab: int = 64) -> Paired:
    return Paired((Twice(width) for _ in range(layers)), width, vocab)


class Stopped(Paired):
    """What comes out the first time is only detached: what the head is to find (SimSiam, JEPA)."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        target = self.once(tokens.flip(1))
        return self.head(self.once(tokens)) * target.detach().mean(-1, keepdim=True)


def stopped(layers: int = 3, width: int = 16, vocab: int = 64) -> Stopped:
    return Stopped((Twice(width) for _ in range(layers)), width, vocab)


def probed(layers: int = 3, width: int = 192, vocab: int = 8) -> Stacked:
    """Nothing but the head is trained: what is gathered is most of what is alive."""
    model = Stacked((Twice(width) for _ in range(layers)), width, vocab)
    model.embedding.requires_grad_(False)
    model.layers.requires_grad_(False)
    return model


class Stamped(Stacked):
    """Learned tokens before all others, and learned positions."""

    def __init__(self, layers: Iterable[nn.Module], width: int, vocab: int, seq: int, firsts: int = 1) -> None:
        super().__init__(layers, width, vocab)
        self.first = nn.Parameter(torch.zeros(1, firsts, width))
        self.positions = nn.Parameter(torch.zeros(1, seq, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.first.expand(tokens.shape[0], -1, -1)
        x = torch.cat([first, self.embedding(tokens[:, first.shape[1]:])], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stamped(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stamped:
    return Stamped((Average(width) for _ in range(layers)), width, vocab, seq)


def hollow(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stamped:
    """The same without a token before the others: a parameter of no elements."""
    return Stamped((Average(width) for _ in range(layers)), width, vocab, seq, firsts=0)


class Named(nn.Module):
    """Called as what the runtime and FSDP2 call their own, a tensor that it keeps too."""

    def __init__(self, width: int, seq: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.core, self.tensor, self.declare = (nn.Linear(width, width) for _ in range(3))
        self.name, self.unshard = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.share = nn.Parameter(torch.ones(width))
        self.register_buffer("constant", torch.linspace(0.5, 1.5, seq)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (
            made(self.name(x)).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
            for made in (self.core, self.tensor)
        )
        x = x + F.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2).flatten(2) * self.share
        return x + self.declare(self.unshard(x)) * self.constant


def named(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stacked:
    return Stacked((Named(width, seq) for _ in range(layers)), width, vocab)


class Settled(Stacked):
    """A fixed point that is sought without gradients and trained for its last two steps; ``late``: the other way round."""

    def __init__(self, layers: Iterable[nn.Module], width: int, vocab: int, *, late: bool) -> None:
        super().__init__(layers, width, vocab)
        self.late = late

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        (layer,) = self.layers
        z = torch.zeros_like(x)
        if self.late:
            for _ in range(2):
                z = layer(z + x)
        found = z
        with torch.no_grad():
            for _ in range(4):
                found = layer(found + x)
        if self.late:
            return self.head(z - found)
        z = found
        for _ in range(2):
            z = layer(z + x)
        return F.linear(z, self.embedding.weight)


def settled(width: int = 16, vocab: int = 64) -> Settled:
    model = Settled([Average(width)], width, vocab, late=False)
    model.head.weight = model.embedding.weight
    return model


def distilled(width: int = 16, vocab: int = 64) -> Settled:
    return Settled([Average(width)], width, vocab, late=True)


class Taught(Stacked):
    """The layers run without gradients too, as a teacher, before they do as the student or ``late``."""

    def __init__(self, layers: Iterable[nn.Module], width: int, vocab: int, late: bool) -> None:
        super().__init__(layers, width, vocab)
        self.late = late

    def once(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def target(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(x.flip(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.late:
            student = self.once(x)
            return self.head(student * torch.sigmoid(self.target(x)))
        target = self.target(x)
        return self.head(self.once(x) * torch.sigmoid(target))


def taught(layers: int = 3, width: int = 64, vocab: int = 16, late: bool = False) -> Taught:
    return Taught((Average(width) for _ in range(layers)), width, vocab, late)


def taught_late(layers: int = 3, width: int = 64, vocab: int = 16) -> Taught:
    return taught(layers, width, vocab, late=True)


class Looked(Stacked):
    """The head compares with the rows of the embedding, which it does not train."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.head(x), self.embedding.weight.detach())


def looked(layers: int = 3, width: int = 16, vocab: int = 512) -> Looked:
    model = Looked((Average(width) for _ in range(layers)), width, vocab)
    model.head = nn.Linear(width, width)
    return model


class Leaning(nn.Module):
    """Its last product reads a tensor whose rows do not lie one after the other, and copies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(x.transpose(1, 2))[..., : x.shape[1]]
        return x + self.down(torch.tanh(mixed.transpose(1, 2)))


def leaning(layers: int = 3, width: int = 32, vocab: int = 16) -> Stacked:
    return Stacked((Leaning(width) for _ in range(layers)), width, vocab)


class Dropping(nn.Module):
    """Its last operation that keeps something is a dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.up(x), 0.1, self.training)


def dropped(layers: int = 3, width: int = 32, vocab: int = 16) -> Stacked:
    return Stacked((Dropping(width) for _ in range(layers)), width, vocab)


class Conditioned(Stacked):
    """Layers are told something of the whole sample, which residual blocks of its own make: it passes more of them than the
    hidden states do, and comes first in every one."""

    def __init__(self, blocks: int, layers: int, width: int, told: int, vocab: int) -> None:
        super().__init__((Modulated(width, told) for _ in range(layers)), width, vocab)
        self.first = nn.Embedding(vocab, told)
        self.blocks = nn.ModuleList(Telling(told) for _ in range(blocks))
        self.last = nn.Linear(told, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        told = self.first(tokens[:, 0])
        for block in self.blocks:
            told = block(told)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(told, x)
        return self.head(self.last(told)[:, None] * x)


class Telling(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, told: torch.Tensor) -> torch.Tensor:
        return told + self.down(torch.tanh(self.up(told)))


class Modulated(nn.Module):
    """A layer whose input is shifted by what it is told."""

    def __init__(self, width: int, told: int) -> None:
        super().__init__()
        self.shift, self.norm = nn.Linear(told, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, told: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift(told)[:, None]
        return x + self.down(torch.tanh(self.up(shift + self.norm(x))))


def conditioned(blocks: int = 3, layers: int = 3, width: int = 16, told: int = 20, vocab: int = 64) -> Conditioned:
    return Conditioned(blocks, layers, width, told, vocab)


class Added(nn.Module):
    """Products by sums of two parameters, one of which lies in more dims, or turned; a parameter as large as what it is added
    to, a sum of a parameter's elements, and two parameters side by side."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Conv1d(width, width, 1)
        self.more, self.less = (nn.Parameter(torch.randn(width, width) / width) for _ in range(2))
        self.place, self.gain = nn.Parameter(torch.randn(1, seq, width) / 8), nn.Parameter(torch.randn(width) / 8)
        self.time = nn.Parameter(torch.randn(seq, width) / 8)
        self.first, self.second = (nn.Parameter(torch.randn(width // 2) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.time[None]
        y = torch.tanh(F.linear(x + self.place, self.up.weight + self.more - self.less, self.up.bias)) * self.gain.sum()
        y = F.conv1d(y.transpose(1, 2), self.down.weight + self.less[..., None], self.down.bias).transpose(1, 2)
        return x + y * torch.cat([self.first, self.second])


class Summed(Stacked):
    """The head is the sum of the embedding and a table of its own, both seen in one more dim."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, (self.embedding.weight[None] + self.head.weight[None])[0])


def added(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Stacked:
    return Stacked((Added(width, seq) for _ in range(layers)), width, vocab)


def summed(layers: int = 4, width: int = 16, vocab: int = 64, seq: int = 24) -> Summed:
    return Summed((Added(width, seq) for _ in range(layers)), width, vocab)


class Noisy(nn.Module):
    """A layer that draws: a latent value, a soft choice, whole channels that are dropped, and whether a sample passes it by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, deviation = self.up(x).chunk(2, -1)
        latent = mean + torch.randn_like(deviation) * torch.tanh(deviation)
        chosen = nn.functional.gumbel_softmax(self.gate(x), tau=0.7)
        stays = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.8
        made = nn.functional.dropout1d(self.down(latent * chosen).transpose(1, 2), 0.25, self.training)
        return x + made.transpose(1, 2) * stays / 0.8


class Diffused(Stacked):
    """Samples are blurred by noise of a strength that is drawn for each, and the noise is taken off in the end."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__((Noisy(width) for _ in range(layers)), width, vocab)
        self.strength = nn.Embedding(8, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        level = torch.randint(0, 8, (tokens.shape[0],), device=tokens.device)
        x = self.embedding(tokens)
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device)
        x = x + self.strength(level)[:, None] * noise
        for layer in self.layers:
            x = layer(x)
        return self.head(x - noise)


def diffused(layers: int = 4, width: int = 16, vocab: int = 64) -> Diffused:
    return Diffused(layers, width, vocab)
