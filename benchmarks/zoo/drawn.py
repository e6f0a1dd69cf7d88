"""Nets drawn at random: ``make("7")`` is the seventh. Attention, networks, convolutions, scales and gates, wired as people wire
them, with parameters that layers, or parts of one, share."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCABULARY = 32, 4, 64


class Attention(nn.Module):
    """Causal; one product or three for queries, keys and values, composed or torch's own, with as many keys or fewer."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.fused, self.composed, self.groups = draw.random() < 0.5, draw.random() < 0.3, draw.choice((HEADS, HEADS // 2))
        self.turned, bias = draw.random() < 0.3, draw.random() < 0.5
        width = WIDTH // HEADS
        if self.fused:
            self.groups = HEADS
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        else:
            self.query = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.key, self.value = (nn.Linear(WIDTH, self.groups * width, bias=bias) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        source = x if other is None else other
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(source), self.value(source))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        if self.turned:
            q, k = turn(q), turn(k)
        if self.groups < HEADS:
            k, v = (part.repeat_interleave(HEADS // self.groups, dim=1) for part in (k, v))
        if self.composed:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            weights = (q @ k.transpose(-1, -2) * k.shape[-1] ** -0.5).masked_fill(~mask, -1e4).softmax(-1)
            made = weights @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 0.1 ** torch.arange(half, device=x.device)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Network(nn.Module):
    """Feed-forward: plain, squared or gated."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind, bias = draw.choice(("gelu", "squared", "gated", "glu")), draw.random() < 0.5
        self.up = nn.Linear(WIDTH, (2 if self.kind == "glu" else 1) * 64, bias=bias)
        if self.kind == "gated":
            self.gate = nn.Linear(WIDTH, 64, bias=bias)
        self.down = nn.Linear(64, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.kind == "gelu":
            h = F.gelu(h)
        elif self.kind == "squared":
            h = F.relu(h) ** 2
        elif self.kind == "gated":
            h = F.silu(self.gate(x)) * h
        else:
            h = F.glu(h)
        return self.down(h)


class Convolution(nn.Module):
    """Along the sequence, each feature by itself, causal."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.size = draw.choice((2, 3, 4))
        self.mix = nn.Conv1d(WIDTH, WIDTH, self.size, groups=WIDTH, padding=self.size - 1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.out(F.silu(mixed))


def norm_of(draw: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), nn.Identity]
    return draw.choices(kinds, (5, 4, 1))[0]()


def part_of(draw: random.Random) -> nn.Module:
    return draw.choices((Attention, Network, Convolution), (4, 4, 1))[0](draw)


class Layer(nn.Module):
    """``wiring``: one part after the other, side by side, each followed by its norm, or as steps between two streams."""

    def __init__(self, draw: random.Random, choices: int) -> None:
        super().__init__()
        self.wiring = draw.choices(("pre", "side", "post", "sandwich", "gated", "first"), (5, 3, 2, 2, 2, 2))[0]
        self.parts = nn.ModuleList([Attention(draw), *(part_of(draw) for _ in range(choices))])
        one = draw.random() < 0.3
        norms = [norm_of(draw)]
        self.norms = nn.ModuleList(norms * len(self.parts) if one else [*norms, *(norm_of(draw) for _ in self.parts[1:])])
        self.scaled, self.leak = draw.random() < 0.3, draw.random() < 0.3
        if self.scaled:
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        if self.leak:
            self.weight = nn.Parameter(torch.full((2,), 0.5))
        if self.wiring == "gated":
            self.gate = nn.Linear(WIDTH, WIDTH)
        self.again = draw.random() < 0.15

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        if self.leak:
            x = self.weight[0] * x + self.weight[1] * first
        if self.wiring == "side":
            h = self.norms[0](x)
            return x + self._scaled(sum(part(h) for part in self.parts))
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = self._step(x, norm, part)
        return self._step(x, self.norms[-1], self.parts[-1]) if self.again else x

    def _step(self, x: torch.Tensor, norm: nn.Module, part: nn.Module) -> torch.Tensor:
        if self.wiring == "post":
            return norm(x + self._scaled(part(x)))
        if self.wiring == "sandwich":
            return x + norm(self._scaled(part(norm(x))))
        if self.wiring == "gated":
            h = norm(x)
            return x + torch.sigmoid(self.gate(h)) * self._scaled(part(h))
        return x + self._scaled(part(norm(x)))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x if self.scaled else x


class Drawn(nn.Module):
    """An embedding, layers of one kind or two in turns, some of them the same one again, a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        count, kinds, parts = draw.choice((4, 5, 6)), draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(256, WIDTH) if draw.random() < 0.4 else None
        seeds = [draw.random() for _ in range(kinds)]
        layers = [Layer(random.Random(seeds[at % kinds]), parts) for at in range(count)]
        if draw.random() < 0.2:
            layers = [layers[at % (2 * kinds)] for at in range(count)]
        self.layers = nn.ModuleList(layers)
        self.norm = norm_of(draw)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=draw.random() < 0.2)
        if draw.random() < 0.3 and self.head.bias is None:
            self.head.weight = self.embedding.weight
        if draw.random() < 0.2:
            for layer in layers[1:]:
                layer.norms = layers[0].norms if len(layer.norms) == len(layers[0].norms) else layer.norms
        self.softened = draw.random() < 0.2
        self.told = draw.random() < 0.15 and layers[-1].scaled

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        first = x
        for layer in self.layers:
            x = layer(x, first)
        logits = self.head(self.norm(x))
        if self.told:
            logits = logits * (1 + self.layers[-1].scale.mean())
        return 20 * torch.tanh(logits / 20) if self.softened else logits


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def make(name: str) -> nn.Module:
    return Drawn(int(name))
