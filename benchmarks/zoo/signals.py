"""Small models of sequences of numbers, written by hand: one of each field that has its own way of mixing them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, FEATURES, WIDTH, CLASSES = 32, 16, 32, 10


def mlp(width: int, times: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, times * width), nn.GELU(), nn.Linear(times * width, width))


class Conformer(nn.Module):
    """Half a feed-forward, attention, a depthwise convolution, half a feed-forward (Gulati et al. 2020); group norm in place of
    batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.Sequential(nn.LayerNorm(width), mlp(width)), nn.Sequential(nn.LayerNorm(width), mlp(width))
        self.attention_norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.conv_norm, self.into = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.middle, self.out, self.norm = nn.GroupNorm(4, width), nn.Conv1d(width, width, 1), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.into(self.conv_norm(x).transpose(1, 2)), dim=1)
        x = x + self.out(F.silu(self.middle(self.depthwise(y)))).transpose(1, 2)
        return self.norm(x + 0.5 * self.after(x))


class Windows(nn.Module):
    """Attention in shifted windows under a learned relative bias (Liu et al. 2021)."""

    def __init__(self, width: int, shift: int, window: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.window, self.heads, self.shift = window, heads, shift
        self.norm, self.mlp = nn.LayerNorm(width), mlp(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(0.02 * torch.randn(2 * window - 1, heads))
        at = torch.arange(window)
        self.register_buffer("places", at[:, None] - at[None, :] + window - 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        y = torch.roll(self.norm(x), -self.shift, 1).reshape(batch * steps // self.window, self.window, width)
        q, k, v = self.qkv(y).reshape(-1, self.window, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.places.flatten()].reshape(self.window, self.window, self.heads).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads) + bias
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, width)
        x = x + torch.roll(self.out(y), self.shift, 1)
        return x + self.mlp(x)


class StateSpace(nn.Module):
    """A diagonal state space as a long convolution (Gu et al. 2022, S4D)."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.linspace(-5.0, -1.0, width))
        self.log_decay = nn.Parameter(torch.zeros(width, states))
        self.angle = nn.Parameter(torch.arange(states, dtype=torch.get_default_dtype()).repeat(width, 1))
        self.read = nn.Parameter(torch.randn(width, states, 2) / states)
        self.direct, self.out, self.norm = nn.Parameter(torch.ones(width)), nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        step = self.log_step.exp()[:, None]
        pole = torch.complex(-self.log_decay.exp() * step, self.angle * step)
        powers = torch.exp(pole[:, :, None] * torch.arange(steps, device=x.device))
        kernel = 2 * (torch.view_as_complex(self.read)[:, :, None] * powers).sum(1).real
        u = self.norm(x).transpose(1, 2)
        mixed = torch.fft.irfft(torch.fft.rfft(u, 2 * steps) * torch.fft.rfft(kernel, 2 * steps), 2 * steps)[..., :steps]
        return x + F.glu(self.out(F.gelu(mixed + self.direct[:, None] * u).transpose(1, 2)), dim=-1)


class Spectrum(nn.Module):
    """Low frequencies mixed and all others cut, beside a product with each step (Li et al. 2021, a Fourier neural operator)."""

    def __init__(self, width: int, modes: int = 5) -> None:
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.randn(modes, width, width, 2) / width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        low, mixed = torch.fft.rfft(x, dim=1), torch.view_as_complex(self.weight)
        kept = torch.zeros_like(low)
        kept[:, : len(mixed)] = torch.einsum("btx,txo->bto", low[:, : len(mixed)], mixed)
        return F.gelu(torch.fft.irfft(kept, n=x.shape[1], dim=1) + self.beside(x))


class Retention(nn.Module):
    """Attention without a softmax that decays with distance (Sun et al. 2023)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.norm, self.group, self.mlp = nn.LayerNorm(width), nn.GroupNorm(heads, width), mlp(width)
        rate = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads)))
        self.register_buffer("rate", rate, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        y = self.norm(x)
        q, k, v = (project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        at = torch.arange(steps, device=x.device)
        apart = at[:, None] - at[None, :]
        decay = torch.where(apart >= 0, torch.exp(self.rate[:, None, None] * apart), 0.0)
        kept = (q @ k.mT * decay) @ v
        kept = self.group(kept.transpose(1, 2).reshape(batch * steps, width)).view(batch, steps, width)
        x = x + self.out(F.silu(self.gate(y)) * kept)
        return x + self.mlp(x)


class LinearAttention(nn.Module):
    """Sums of keys times values over the past in place of a softmax (Katharopoulos et al. 2020)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.mlp = heads, nn.LayerNorm(width), mlp(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        sums = (q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-6
        x = x + self.out((torch.einsum("bthd,bthde->bthe", q, states) / sums).flatten(2))
        return x + self.mlp(x)


class Cross(nn.Module):
    """x0 times a product of x, added to x, beside what some experts of low rank say (Wang et al. 2021, DCN-v2)."""

    def __init__(self, width: int, experts: int = 4, rank: int = 8) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(experts, width, rank) / width)
        self.up = nn.Parameter(torch.randn(experts, rank, width) / rank)
        self.bias, self.gate = nn.Parameter(torch.zeros(width)), nn.Linear(width, experts)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        low = torch.tanh(torch.einsum("btw,ewr->bter", x, self.down))
        high = torch.einsum("bter,erw->btew", low, self.up) + self.bias
        return x + (first.unsqueeze(-2) * high * self.gate(x).softmax(-1).unsqueeze(-1)).sum(-2)


class Crossed(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers, self.deep = nn.ModuleList(Cross(width) for _ in range(layers)), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        crossed = x
        for layer in self.layers:
            crossed = layer(x, crossed)
        return crossed + self.deep(x)


class Latents(nn.Module):
    """Learned latents that read the inputs again in every layer (Jaegle et al. 2021)."""

    def __init__(self, width: int, layers: int, latents: int = 8) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(latents, width))
        self.reads = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers))
        self.norms, self.mlps = (nn.ModuleList(make(width) for _ in range(layers)) for make in (nn.LayerNorm, mlp))

    def forward(self, x: Tensor) -> Tensor:
        z = self.latents.expand(len(x), -1, -1)
        for read, norm, feed in zip(self.reads, self.norms, self.mlps, strict=True):
            z = z + read(norm(z), x, x, need_weights=False)[0]
            z = z + feed(z)
        return z


class Messages(nn.Module):
    """Messages along the edges of a fixed graph, summed at their targets (Gilmer et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update, self.norm = mlp(2 * width, 1), nn.GRUCell(width, width), nn.LayerNorm(width)
        self.out = nn.Linear(2 * width, width)
        at = torch.arange(STEPS)
        self.register_buffer("sources", torch.cat((at, at, at)))
        self.register_buffer("targets", torch.cat(((at + 1) % STEPS, (at + 5) % STEPS, (3 * at) % STEPS)))

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.cat((x[:, self.sources], x[:, self.targets]), -1)
        summed = torch.zeros_like(x).index_add(1, self.targets, self.out(F.relu(self.message(edges))))
        return self.norm(self.update(summed.flatten(0, 1), x.flatten(0, 1)).view_as(x))


class Patches(nn.Module):
    """Overlapping patches of each feature by itself, normed by its own moments (Nie et al. 2023)."""

    def __init__(self, width: int, layers: int, length: int = 8, stride: int = 4) -> None:
        super().__init__()
        self.length, self.stride, count = length, stride, (STEPS - length) // stride + 1
        self.scale, self.embed = nn.Parameter(torch.ones(width)), nn.Linear(length, 16)
        self.places = nn.Parameter(0.02 * torch.randn(count, 16))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(layers))
        self.out = nn.Linear(16 * count, STEPS)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True, unbiased=False) + 1e-5
        y = ((x - mean) / deviation * self.scale).transpose(1, 2).unfold(-1, self.length, self.stride)
        batch, width = y.shape[:2]
        y = (self.embed(y) + self.places).flatten(0, 1)
        for layer in self.layers:
            y = layer(y)
        return self.out(y.view(batch, width, -1)).transpose(1, 2) * deviation + mean


class Codes(nn.Module):
    """The nearest code in place of each value, gradients straight through (van den Oord et al. 2017)."""

    def __init__(self, width: int, codes: int = 16) -> None:
        super().__init__()
        self.into, self.codes, self.out = mlp(width), nn.Parameter(torch.randn(codes, width)), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        nearest = (y.pow(2).sum(-1, keepdim=True) - 2 * y @ self.codes.T + self.codes.pow(2).sum(-1)).argmin(-1)
        coded = F.embedding(nearest, self.codes)
        return x + self.out(y + (coded - y).detach() + 0.25 * (coded - coded.detach()))


class Recalled(nn.Module):
    """A recurrent cell that reads the code nearest to what it remembers, within the bounds of that (a memory of codes)."""

    def __init__(self, width: int, codes: int = 16) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)
        self.codes = nn.Parameter(torch.randn(codes, width))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes.detach()).argmin(-1)
        y = self.cell(F.embedding(nearest, self.codes).flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.norm(x + torch.clamp(y, -x.abs(), x.abs()))


class Recurrent(nn.Module):
    """A recurrent layer over all steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.steps = nn.LayerNorm(width), nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps(self.norm(x))[0]


class Rendered(nn.Module):
    """What is seen along rays: densities that hide what lies behind them (Mildenhall et al. 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.field, self.density, self.colour = mlp(4 * width), nn.Linear(4 * width, 1), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        bands = torch.cat([wave(2**band * x) for band in range(2) for wave in (torch.sin, torch.cos)], -1)
        y = self.field(bands)
        seen = 1 - torch.exp(-F.softplus(self.density(y)))
        through = torch.cumprod(torch.cat((torch.ones_like(seen[:, :1]), 1 - seen + 1e-6), 1), 1)[:, :-1]
        return x + (seen * through) * self.colour(y).sigmoid()


class Adapted(nn.Module):
    """A frozen layer with a trained update of low rank (Hu et al. 2021)."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.norm, self.base, self.after = nn.LayerNorm(width), mlp(width).requires_grad_(False), nn.LayerNorm(width)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.after(x + self.base(y) + 2.0 * self.up(self.down(y)))


class Routed(nn.Module):
    """Capsules that agree by routing (Sabour et al. 2017)."""

    def __init__(self, width: int, capsules: int = 4, rounds: int = 3) -> None:
        super().__init__()
        self.capsules, self.rounds, self.votes, self.norm = capsules, rounds, nn.Linear(width // 4, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        votes = self.votes(x.unflatten(-1, (4, -1))).unflatten(-1, (self.capsules, -1))
        logits = torch.zeros(votes.shape[:-1], dtype=x.dtype, device=x.device)
        for _ in range(self.rounds):
            total = (logits.softmax(-1).unsqueeze(-1) * votes).sum(2, keepdim=True)
            squared = total.square().sum(-1, keepdim=True)
            squashed = squared / (1 + squared) * total * torch.rsqrt(squared + 1e-6)
            logits = logits + (votes * squashed).sum(-1)
        return self.norm(x + squashed.flatten(2))


class Dynamics(nn.Module):
    """Four steps of Runge and Kutta through one field (Chen et al. 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            first = self.field(x)
            second = self.field(x + 0.25 * first)
            third = self.field(x + 0.25 * second)
            x = x + (first + 2 * second + 2 * third + self.field(x + 0.5 * third)) / 12
        return x


class Banded(nn.Module):
    """Attention to the steps nearby only, unfolded (Beltagy et al. 2020)."""

    def __init__(self, width: int, reach: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.reach, self.heads, self.norm, self.mlp = reach, heads, nn.LayerNorm(width), mlp(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = (F.pad(part, (0, 0, 0, 0, self.reach, self.reach)).unfold(1, 2 * self.reach + 1, 1) for part in (k, v))
        weights = torch.einsum("bthd,bthdw->bthw", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out(torch.einsum("bthw,bthdw->bthd", weights, v).flatten(2))
        return x + self.mlp(x)


BLOCKS = {
    "adapted": Adapted, "banded": Banded, "codes": Codes, "conformer": Conformer, "dynamics": Dynamics,
    "linear_attention": LinearAttention, "messages": Messages, "recalled": Recalled, "recurrent": Recurrent,
    "rendered": Rendered, "retention": Retention, "routed": Routed, "spectrum": Spectrum,
    "state_space": StateSpace,
}
WHOLE = {"crossed": Crossed, "latents": Latents, "patches": Patches}
NAMES = (*BLOCKS, *WHOLE, "windows")


class Net(nn.Module):
    """Steps embedded, mixed, and averaged into classes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(FEATURES, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    if name == "windows":
        return Net(*(Windows(WIDTH, shift) for shift in (0, 4, 0, 4)))
    return Net(WHOLE[name](WIDTH, 4)) if name in WHOLE else Net(*(BLOCKS[name](WIDTH) for _ in range(4)))


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, STEPS, FEATURES), "labels": torch.randint(0, CLASSES, (batch,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])
