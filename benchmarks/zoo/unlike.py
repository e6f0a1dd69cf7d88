"""Nets of images in which nothing repeats: every layer has sizes of its own, and no list holds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CHANNELS, CLASSES = 32, 3, 10


class Pyramid(nn.Module):
    """Convolutions and pools (Simonyan and Zisserman 2015)."""

    def __init__(self) -> None:
        super().__init__()
        layers, channels = list[nn.Module](), CHANNELS
        for width in (8, 8, 0, 16, 16, 0, 24, 32, 0):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
            channels = width or channels
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16 * channels, 48), nn.ReLU(), nn.Linear(48, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Narrowing(nn.Module):
    """A perceptron of many layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = list[nn.Module]()
        for before, after in ((CHANNELS * SIDE**2, 96), (96, 80), (80, 64), (64, 48), (48, 32)):
            layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.GELU()]
        self.layers, self.head = nn.Sequential(nn.Flatten(), *layers), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Coder(nn.Module):
    """An image made again from a code, which is also told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 4, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 4, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 4, 2, 1),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.GELU(),
            nn.Conv2d(8, CLASSES, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).mean((2, 3))


class Widening(nn.Module):
    """Stages with sums around them, each written out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(CHANNELS, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.wider, self.beside, self.after = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(8, 16, 1, 2), nn.Conv2d(16, 16, 3, padding=1)
        self.mixed, self.head = nn.Linear(16, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.second(F.relu(self.first(x)))
        x = self.beside(x) + self.after(F.relu(self.wider(x)))
        return self.head(F.silu(self.mixed(x.mean((2, 3)))))


NETS = {"coder": Coder, "narrowing": Narrowing, "pyramid": Pyramid, "widening": Widening}
NAMES = tuple(NETS)


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    return NETS[name]()


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, CHANNELS, SIDE, SIDE), "labels": torch.randint(0, CLASSES, (batch,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])
