"""Language models of recent papers, written by hand as their authors write them: for what libraries do otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 64, 32, 4
HEAD = WIDTH // HEADS


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """[batch, steps, count x size] as [batch, count, steps, size]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rotated(x: Tensor) -> Tensor:
    """Pairs of neighbours turned by their step (Su et al. 2021)."""
    steps, size = x.shape[-2:]
    rates = 10000 ** (torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(steps, device=x.device)[:, None] / rates
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))


class Gated(nn.Module):
    """A gated linear unit (Shazeer 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, -1)
        return self.out(F.silu(gate) * value)


class Capped(nn.Module):
    """Norms before and after, scores softly capped, grouped queries, every other layer sees few steps (Gemma 2, 2024)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.norms, self.near = nn.ModuleList(nn.RMSNorm(width) for _ in range(4)), layer % 2 == 0
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, (k, v) = rotated(heads(self.q(y))), heads(self.kv(y)).chunk(2, 1)
        k, v = (part.repeat_interleave(2, 1) for part in (rotated(k), v))
        scores = 50 * torch.tanh(q @ k.transpose(-1, -2) / (50 * math.sqrt(HEAD)))
        at = torch.arange(x.shape[1], device=x.device)
        hidden = at[:, None] < at
        if self.near:
            hidden = hidden | (at[:, None] - at > 4)
        x = x + self.norms[1](self.o(joined(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)))
        return x + self.norms[3](self.mlp(self.norms[2](x)))


class Latent(nn.Module):
    """Keys and values from one small vector a step, rotated parts apart (DeepSeek-V2, 2024)."""

    def __init__(self, width: int, layer: int, rank: int = 12, turned: int = 4) -> None:
        super().__init__()
        self.rank, self.turned = rank, turned
        self.q_down, self.q_norm = nn.Linear(width, rank, bias=False), nn.RMSNorm(rank)
        self.q_up = nn.Linear(rank, HEADS * (HEAD + turned), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(width, rank + turned, bias=False), nn.RMSNorm(rank)
        self.kv_up, self.o = nn.Linear(rank, HEADS * 2 * HEAD, bias=False), nn.Linear(width, width, bias=False)
        self.norm, self.mlp_norm, self.mlp = nn.RMSNorm(width), nn.RMSNorm(width), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, q_turned = heads(self.q_up(self.q_norm(self.q_down(y)))).split((HEAD, self.turned), -1)
        small, k_turned = self.kv_down(y).split((self.rank, self.turned), -1)
        k, v = heads(self.kv_up(self.kv_norm(small))).chunk(2, -1)
        k_turned = rotated(k_turned[:, None]).expand(-1, HEADS, -1, -1)
        x = x + self.o(attend(torch.cat((q, rotated(q_turned)), -1), torch.cat((k, k_turned), -1), v))
        return x + self.mlp(self.mlp_norm(x))


class DualSpace(nn.Module):
    """A state space as attention with decay, convolved inputs (Dao and Gu 2024, Mamba 2)."""

    def __init__(self, width: int, layer: int, states: int = 8) -> None:
        super().__init__()
        self.parts, mixed = (2 * width, 2 * width + 2 * states, HEADS), 2 * width + 2 * states
        self.states, self.norm, self.into = states, nn.RMSNorm(width), nn.Linear(width, sum(self.parts), bias=False)
        self.convolution = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.log_rate, self.step, self.direct = (nn.Parameter(torch.zeros(HEADS)) for _ in range(3))
        self.out_norm, self.out = nn.RMSNorm(2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        gate, mixed, step = self.into(self.norm(x)).split(self.parts, -1)
        mixed = F.silu(self.convolution(mixed.transpose(1, 2))[..., :count].transpose(1, 2))
        u, write, read = mixed.split((self.parts[0], self.states, self.states), -1)
        step, u = F.softplus(step + self.step), u.unflatten(-1, (HEADS, -1))
        passed = (-self.log_rate.exp() * step).cumsum(1).transpose(1, 2)
        later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
        decay = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, float("-inf")).exp()
        y = torch.einsum("bin,bjn,bhij,bjh,bjhp->bihp", read, write, decay, step, u) + u * self.direct[:, None]
        return x + self.out(self.out_norm(y.flatten(2) * F.silu(gate)))


class Sphere(nn.Module):
    """Weights and values of length one (Loshchilov et al. 2024, nGPT)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.into, self.out = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.rates, self.scale = nn.Parameter(torch.full((2, width), 0.1)), nn.Parameter(torch.ones(HEADS, 1, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        def product(x: Tensor, layer: nn.Linear) -> Tensor:
            return F.linear(x, F.normalize(layer.weight, dim=-1))

        q, k, v = map(heads, product(x, self.qkv).chunk(3, -1))
        q, k = (F.normalize(part, dim=-1) * self.scale for part in (q, k))
        y = F.normalize(product(attend(q, k, v, math.sqrt(HEAD)), self.o), dim=-1)
        x = F.normalize(x + self.rates[0].abs() * (y - x), dim=-1)
        value, gate = product(x, self.into).chunk(2, -1)
        y = F.normalize(product(value * F.silu(gate), self.out), dim=-1)
        return F.normalize(x + self.rates[1].abs() * (y - x), dim=-1)


class NormedHeads(nn.Module):
    """Queries and keys normed head by head (Dehghani et al. 2023)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm, self.mlp = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o(attend(self.q_norm(q), self.k_norm(k), v))
        return x + self.mlp(x)


class Streams(nn.Module):
    """Several residual streams, mixed by the input (Zhu et al. 2024, hyper-connections)."""

    def __init__(self, width: int, layer: int, streams: int = 2) -> None:
        super().__init__()
        self.norm, self.mlp, self.dynamic = nn.LayerNorm(width), Gated(width), nn.Linear(width, streams + 1, bias=False)
        self.mixing, self.writing = nn.Parameter(torch.eye(streams, streams + 1)), nn.Parameter(torch.ones(streams))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mixing + 0.1 * torch.tanh(self.dynamic(self.norm(x)))
        mixed = torch.einsum("bsnk,bsnd->bskd", weights, x)
        return mixed[:, :, 1:] + self.mlp(self.norm(mixed[:, :, 0]))[:, :, None] * self.writing[:, None]


class Differential(nn.Module):
    """One softmax less a part of another, the part learned, norms of the heads in float32 (Ye et al. 2024)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.size, self.start = width // HEADS // 2, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.shares = nn.ParameterList(torch.randn(self.size) * 0.1 for _ in range(4))
        self.norms, self.scale = nn.ModuleList(nn.RMSNorm(width) for _ in range(2)), nn.Parameter(torch.ones(HEAD))
        self.mlp = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        y, steps = self.norms[0](x), x.shape[1]
        q, k, v = heads(self.q(y), 2 * HEADS) * self.size**-0.5, heads(self.k(y), 2 * HEADS), heads(self.v(y))
        scores = q @ k.transpose(-1, -2)
        later = torch.triu(torch.zeros(steps, steps, device=x.device).float().fill_(float("-inf")).type_as(scores), 1)
        likely = F.softmax(scores + later, dim=-1, dtype=torch.float32).type_as(scores).unflatten(1, (HEADS, 2))
        first, second, third, fourth = self.shares
        less = torch.exp((first * second).sum(-1).float()) - torch.exp((third * fourth).sum(-1).float())
        mixed = ((likely[:, :, 0] - (less + self.start).type_as(q) * likely[:, :, 1]) @ v).float()
        normed = (mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.scale
        x = x + self.o(joined(normed * (1 - self.start)))
        return x + self.mlp(self.norms[1](x))


class SoftExperts(nn.Module):
    """Slots of experts are averages of all steps, steps of all slots (Puigcerver et al. 2023)."""

    def __init__(self, width: int, layer: int, experts: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.norm, self.slots = nn.LayerNorm(width), nn.Parameter(torch.randn(width, experts, slots) * 0.1)
        self.into = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.out = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.einsum("bsd,dep->bsep", y, self.slots)
        given = torch.einsum("bsep,bsd->bepd", scores.softmax(1), y)
        made = torch.einsum("beph,ehd->bepd", F.gelu(torch.einsum("bepd,edh->beph", given, self.into)), self.out)
        return x + torch.einsum("bsep,bepd->bsd", scores.flatten(2).softmax(-1).view_as(scores), made)


class Depths(nn.Module):
    """Half of the steps, those of the highest scores, go through the layer (Raposo et al. 2024)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.score, self.norm, self.mlp = nn.Linear(width, 1, bias=False), nn.RMSNorm(width), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        scores, rows = torch.topk(self.score(x)[..., 0], x.shape[1] // 2, dim=1)
        rows, order = torch.sort(rows, dim=1)
        index = rows[..., None].expand(-1, -1, x.shape[-1])
        made = self.mlp(self.norm(torch.gather(x, 1, index))) * torch.gather(scores, 1, order)[..., None].sigmoid()
        return torch.scatter_add(x, 1, index, made)


class WideStream(nn.Module):
    """What the layers add to is float32 whatever they compute in (Gu and Dao 2023, ``residual_in_fp32``)."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.mlp = nn.LayerNorm(width), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.norm.weight.dtype
        q, k, v = map(heads, self.qkv(self.norm(x.to(narrow))).chunk(3, -1))
        x = x.float() + self.o(attend(q, k, v))
        return x + self.mlp(self.second(x.to(narrow)))


BLOCKS = {
    "capped": Capped, "dual_space": DualSpace, "latent_attention": Latent, "normed_heads": NormedHeads, "sphere": Sphere,
    "streams": Streams,
    "differential": Differential, "soft_experts": SoftExperts, "depths": Depths,
    "wide_stream": WideStream,
}
NAMES = (*BLOCKS, "value_residual")


class Net(nn.Module):
    """``streams``: copies of the residual stream; ``cap``: of the logits; ``tied``: the head is the embedding."""

    def __init__(self, name: str, *, layers: int = 4, streams: int = 1, cap: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.streams, self.cap, self.embed = streams, cap, nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(BLOCKS[name](WIDTH, layer) for layer in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * math.sqrt(WIDTH)
        if self.streams > 1:
            x = x[:, :, None].expand(-1, -1, self.streams, -1)
        for layer in self.layers:
            x = layer(x)
        x = (x.sum(2) if self.streams > 1 else x).to(self.head.weight.dtype)
        y = self.head(self.norm(x))
        return self.cap * torch.tanh(y / self.cap) if self.cap else y


class ValueResidual(nn.Module):
    """Embeddings added to values, the first value of the stream to every layer's, early layers' results to late ones' (Jordan
    et al. 2024, modded-nanogpt; Zhou et al. 2024)."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.values = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.o, self.into, self.out = (
            nn.ModuleList(nn.Linear(first * WIDTH, last * WIDTH, bias=False) for _ in range(layers))
            for first, last in ((1, 3), (1, 1), (1, 4), (4, 1))
        )
        self.shares, self.skips = nn.Parameter(torch.full((layers, 2), 0.5)), nn.Parameter(torch.ones(layers // 2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        def normed(x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:])

        x = first = normed(self.embed(input_ids))
        early, layers = list[Tensor](), len(self.qkv)
        for at in range(layers):
            if at >= layers // 2:
                x = x + self.skips[at - layers // 2] * early.pop()
            x = self.shares[at, 0] * x + self.shares[at, 1] * first
            q, k, v = map(heads, self.qkv[at](normed(x)).chunk(3, -1))
            if at in (0, layers - 1):
                v = v + heads(self.values(input_ids))
            x = x + self.o[at](attend(normed(q), normed(k), v))
            x = x + self.out[at](F.relu(self.into[at](normed(x))).square())
            if at < layers // 2:
                early.append(x)
        return 15 * torch.tanh(self.head(normed(x)) / 15)


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    if name == "value_residual":
        return ValueResidual()
    return Net(name, streams=2 if name == "streams" else 1, cap=30.0 if name == "capped" else 0.0, tied=name == "capped")
