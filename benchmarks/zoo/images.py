"""Small models of images: from the Hugging Face library, and a mixer written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
PATCHES = {**WIDTH, "image_size": 32, "patch_size": 8, "num_labels": 10}
LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "convnext": ("ConvNext", {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "num_labels": 10}),
    "dinov2": ("Dinov2", PATCHES),
    "vit": ("ViT", PATCHES),
}
NAMES = (*LIBRARY, "mixer")


class Logits(nn.Module):
    """A library's model, for one input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


class MixerBlock(nn.Module):
    """Over the patches, then over the features (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.patch_norm, self.feature_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.over_features = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.patch_norm(x).mT).mT
        return x + self.over_features(self.feature_norm(x))


class Mixer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def make(name: str) -> nn.Module:
    """One of :data:`NAMES`, with initial weights."""
    if name == "mixer":
        return Mixer()
    kind, values = LIBRARY[name]
    return Logits(transformers.AutoModelForImageClassification.from_config(getattr(transformers, f"{kind}Config")(**values)))


def example_inputs(batch: int, seq: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 10, (batch,))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])
