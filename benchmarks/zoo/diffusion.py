"""A small U-Net that predicts noise: convolutions down and back up, group norms, a skip over the whole of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = ("unet",)


class Residual(nn.Module):
    def __init__(self, into: int, out: int, time: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.first_norm, self.second_norm, self.time = nn.GroupNorm(4, into), nn.GroupNorm(4, out), nn.Linear(time, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.first_norm(x))) + self.time(time)[:, :, None, None]
        return self.second(F.silu(self.second_norm(hidden))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.fine, self.down = Residual(width, width), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.coarse, self.middle = Residual(2 * width, 2 * width), Residual(2 * width, 2 * width)
        self.joined, self.up = Residual(4 * width, 2 * width), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = Residual(2 * width, width)

    def forward(self, noisy: Tensor, moment: Tensor) -> Tensor:
        angles = moment[:, None] * torch.exp(-torch.arange(8, device=noisy.device) / 8 * 9.2)[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        fine = self.fine(self.into(noisy), time)
        coarse = self.coarse(self.down(fine), time)
        joined = self.joined(torch.cat([self.middle(coarse, time), coarse], 1), time)
        return self.out(self.last(torch.cat([self.up(joined), fine], 1), time))


def make(name: str) -> nn.Module:
    """The only one of :data:`NAMES`."""
    return UNet()


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    image = (batch, 3, 32, 32)
    return {"noisy": torch.randn(image), "noise": torch.randn(image), "moment": torch.rand(batch)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(outputs, batch["noise"])
