"""Nets of images, written by hand as their authors write them: windows, patches that overlap, weights that are normalised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CHANNELS, WIDTH, CLASSES = 32, 3, 32, 10


class Mixer(nn.Module):
    """Steps mixed, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(steps, 2 * steps), nn.GELU(), nn.Linear(2 * steps, steps))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.first(x).mT).mT
        return x + self.within(self.second(x))


class Unfolded(nn.Module):
    """Patches that overlap (Heo et al. 2021), mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.embed = nn.Unfold(8, stride=4), nn.Linear(64 * CHANNELS, WIDTH)
        self.layers = nn.ModuleList(Mixer(49, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.patches(x).mT)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class ChannelNorm(nn.Module):
    """A norm over channels where they come first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(1, width, 1, 1)), nn.Parameter(torch.zeros(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var(x, dim=1, unbiased=False, keepdim=True), torch.mean(x, dim=1, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.gain + self.shift


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(width)
        self.layers = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Nested(nn.Module):
    """Windows by themselves, then joined (Zhang et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 4, 4)
        self.near = nn.ModuleList(Bottleneck(WIDTH) for _ in range(2))
        self.join = nn.Sequential(nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), ChannelNorm(2 * WIDTH), nn.MaxPool2d(3, 2, 1))
        self.far = nn.ModuleList(Bottleneck(2 * WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        for layer in self.near:
            x = layer(x)
        x = self.join(x.unflatten(0, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(2, 3).flatten(3, 4))
        for layer in self.far:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Standardised(nn.Module):
    """A convolution of normalised weights (Brock et al. 2021), and an instance norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(width, width, 3, 3)), nn.Parameter(torch.ones(width))
        self.norm, self.activate = nn.InstanceNorm2d(width, affine=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(flat, None, None, self.gain, training=True, momentum=0.0).reshape_as(self.weight)
        return x + self.activate(self.norm(F.conv2d(x, weight, padding=1)))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(CHANNELS, 16, 4, 4), nn.ModuleList(Standardised(16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Funnel(nn.Module):
    """Images that are small after the first block: a batch is more than a late stage holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(CHANNELS, 16, 8, 8), nn.ModuleList(Mixer(4, 16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.stem(x), 2).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


NETS = {"convolved": Convolved, "funnel": Funnel, "nested": Nested, "unfolded": Unfolded}
NAMES = tuple(NETS)


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    return NETS[name]()


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, CHANNELS, SIDE, SIDE), "labels": torch.randint(0, CLASSES, (batch,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])
