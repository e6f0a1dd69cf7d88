"""Small models that draw at random in forward: autoencoders, diffusion, masked modelling, noisy choices.

Forward returns the terms of the loss and their weights; what is drawn stays out of comparisons with a plain model's numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, FEATURES, WIDTH = 16, 12, 32


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)


class Autoencoder(nn.Module):
    """A latent value of every step: mean, deviation and noise (Kingma and Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.first, self.last = nn.ModuleList(Encoder() for _ in range(2)), nn.ModuleList(Encoder() for _ in range(2))
        self.both, self.back = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.into(x)
        for layer in self.first:
            h = layer(h)
        mean, spread = self.both(h).chunk(2, -1)
        h = self.back(mean + torch.exp(0.5 * spread) * torch.randn_like(spread))
        for layer in self.last:
            h = layer(h)
        apart = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1)
        terms = (self.out(h) - x).square().sum(-1) + 0.01 * apart
        return terms, torch.ones_like(terms)


class Denoised(nn.Module):
    """Noise of a drawn strength is told from what it lies on (Ho et al. 2020), with whole channels dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv1d(FEATURES, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, FEATURES, 3, padding=1)
        self.levels = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(4))
        self.drop = nn.Dropout1d(0.1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        clean = x.transpose(1, 2)
        level, noise = torch.randint(0, 50, (x.shape[0],), device=x.device), torch.randn_like(clean)
        part = self.kept[level].to(x.dtype)[:, None, None]
        h = self.into(part.sqrt() * clean + (1 - part).sqrt() * noise)
        told = self.levels(level)[:, :, None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + self.drop(layer(F.silu(norm(h + told))))
        terms = (self.out(h) - noise).square().sum(1)
        return terms, torch.ones_like(terms)


class Masked(nn.Module):
    """A part of the steps is hidden, another one of every sample, and told from the others (He et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.hidden, self.places = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.randn(STEPS, WIDTH) / 50)
        self.layers = nn.ModuleList(Encoder() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(x.shape[0], STEPS, 1, device=x.device) < 0.4
        h = torch.where(mask, self.hidden, self.into(x)) + self.places
        for layer in self.layers:
            h = layer(h)
        return (self.out(h) - x).square() * mask, mask.to(x.dtype)


class Passing(nn.Module):
    """Layers that a sample passes by at random (Huang et al. 2016), of values that alpha dropout drops."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SELU(), nn.AlphaDropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.into(x)
        for layer in self.layers:
            h = h + layer(h) * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8) / 0.8
        terms = (self.out(h) - x).square()
        return terms, torch.ones_like(terms)


class Chosen(nn.Module):
    """Experts are chosen by noisy scores (Shazeer et al. 2017), and a code softly (Jang et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.score, self.noise, self.codes = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 8)
        self.book = nn.Parameter(torch.randn(8, WIDTH))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.into(x)
        scores = self.score(h)
        best, which = (scores + torch.randn_like(scores) * F.softplus(self.noise(h))).topk(2, -1)
        shares = torch.zeros_like(scores).scatter(-1, which, best.softmax(-1))
        h = h + sum(shares[..., at : at + 1] * expert(h) for at, expert in enumerate(self.experts))
        h = h + F.gumbel_softmax(self.codes(h), tau=0.7, hard=True) @ self.book
        terms = (self.out(h) - x).square()
        return terms, torch.ones_like(terms)


class Layered(nn.Module):
    """A recurrent network with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.out = nn.GRU(FEATURES, WIDTH, 3, dropout=0.2, batch_first=True), nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        terms = (self.out(self.steps(x)[0][:, :-1]) - x[:, 1:]).square()
        return terms, torch.ones_like(terms)


MODELS = {
    "autoencoder": Autoencoder, "chosen": Chosen, "denoised": Denoised, "layered": Layered, "masked": Masked,
    "passing": Passing,
}
NAMES = tuple(MODELS)


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    return MODELS[name]()


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, STEPS, FEATURES)}


def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    terms, weights = outputs
    return terms.sum() / weights.sum()
