"""Nets of images, written by hand as their authors write them: windows, patches that overlap, weights that are normalised."""

from __future__ import annotations

from collections.abc import Iterable

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


class Stacked(nn.Module):
    """A stem, layers of one kind, the average of what they return, and a head."""

    def __init__(self, stem: nn.Module, layers: Iterable[nn.Module], width: int, over: tuple[int, ...] = (2, 3)) -> None:
        super().__init__()
        self.stem, self.layers, self.head, self.over = stem, nn.ModuleList(layers), nn.Linear(width, CLASSES), over

    def enter(self, x: Tensor) -> Tensor:
        """What the first layer reads."""
        return self.stem(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(self.over))


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


class Convolved(Stacked):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, 16, 4, 4), (Standardised(16) for _ in range(4)), 16)


class Funnel(Stacked):
    """Images that are small after the first block: a batch is more than a late stage holds."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, 16, 8, 8), (Mixer(4, 16) for _ in range(4)), 16, over=(1,))

    def enter(self, x: Tensor) -> Tensor:
        """Pixels one after another, channels last."""
        return F.avg_pool2d(self.stem(x), 2).flatten(2).mT


class Talking(nn.Module):
    """Attention whose heads are mixed before the softmax and after it (Shazeer et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.before, self.after, self.out = nn.Linear(heads, heads), nn.Linear(heads, heads), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.before((query @ key.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.out((mixed @ value).transpose(1, 2).flatten(2))


class Heard(Stacked):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, WIDTH, 8, 8), (Talking(WIDTH, 4) for _ in range(4)), WIDTH, over=(1,))

    def enter(self, x: Tensor) -> Tensor:
        """Pixels one after another, channels last."""
        return self.stem(x).flatten(2).mT


class Grid(nn.Module):
    """Rows and columns are one dim inside (Liu et al. 2021): what it returns is a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer = Mixer(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x.flatten(1, 2)).unflatten(1, (8, 8))


class Gridded(Stacked):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, WIDTH, 4, 4), (Grid(WIDTH) for _ in range(4)), WIDTH, over=(1, 2))

    def enter(self, x: Tensor) -> Tensor:
        """Channels last."""
        return self.stem(x).permute(0, 2, 3, 1)


class Hybrid(nn.Module):
    """A convolution, then a mixer of the pixels (Hoogeboom et al. 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near, self.norm, self.within = nn.Conv2d(width, width, 3, padding=1), nn.LayerNorm(width), nn.Linear(width, width)
        self.far = Mixer(64, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.within(self.norm(self.near(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        batch, width, height, length = x.shape
        x = self.far(x.reshape(batch, width, height * length).permute(0, 2, 1))
        return x.permute(0, 2, 1).reshape(batch, width, height, length)


class Diffused(Stacked):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, WIDTH, 4, 4), (Hybrid(WIDTH) for _ in range(4)), WIDTH)


class Block(nn.Module):
    """Windows of an image whose channels come first; dims that lie apart are cut and joined again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer = Mixer(16, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, length = x.shape
        x = x.permute(0, 2, 3, 1).reshape(batch, 2, 4, 2, 4, width).transpose(2, 3).reshape(batch * 4, 16, width)
        x = self.mixer(x).reshape(batch, 2, 2, 4, 4, width).transpose(2, 3).reshape(batch, height, length, width)
        return x.permute(0, 3, 1, 2)


class Cut(Stacked):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(CHANNELS, WIDTH, 4, 4), (Block(WIDTH) for _ in range(4)), WIDTH)


NETS = {
    "convolved": Convolved, "cut": Cut, "diffused": Diffused, "funnel": Funnel, "gridded": Gridded, "heard": Heard,
    "nested": Nested, "unfolded": Unfolded,
}
NAMES = tuple(NETS)


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    return NETS[name]()


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, CHANNELS, SIDE, SIDE), "labels": torch.randint(0, CLASSES, (batch,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])
