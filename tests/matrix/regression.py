"""A model without tokens: a deep regression whose loss is the user's own, a mean of squared differences."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def example_inputs(batch: int, seq: int | None) -> dict[str, Tensor]:
    """Float inputs, in the precision of the job."""
    return {"features": torch.zeros(batch, 12, 30), "target": torch.zeros(batch, 12, 18)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """12 x 18 terms a sample, each about 100: a half would lose the later ones, and float16 overflow."""
    return ((outputs - batch["target"] - 10) ** 2).mean()


def two_averages(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The same, and one of other, fewer terms."""
    return loss(outputs, batch) + 3 * nn.functional.l1_loss(outputs[..., :5].sum(1), batch["target"][:, 0, :5])


def overlap(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """How far what is there and what is found are from covering each other, where a mask has it; samples weigh unequally."""
    there = batch["target"] > 0
    return 1 - (outputs.sigmoid() * there).sum() / there.sum()


def several(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Averages over the terms that two masks leave, which differ in number from batch to batch, and one over all."""
    far = batch["target"].abs() > 1
    distance = ((outputs - batch["target"]) ** 2 * far).sum() / far.sum()
    return overlap(outputs, batch) + 2 * distance + loss(outputs, batch) / 100


def weighed(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Two averages by learned weights, and a penalty on parameters of a layer."""
    found, uncertain, penalty = outputs
    first, second = loss(found, batch), nn.functional.l1_loss(found[..., :5], batch["target"][..., :5])
    return (-uncertain[0]).exp() * first + uncertain[0] + second / (2 * uncertain[1] ** 2) + uncertain[1].abs().log() + penalty


def stacked(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Averages in stacks within stacks, by learned weights, over what masks leave; one of these is stretched."""
    found, uncertain, penalty = outputs
    far, there = batch["target"].abs() > 1, (batch["target"][..., :1] > 0).expand_as(found)
    inner = torch.stack([(found * far).square().sum() / far.sum().clamp(min=1), loss(found, batch) / 100])
    both = torch.stack([inner.mean(), inner[0] / 2 + inner[1]])
    return ((-uncertain).exp() * both + uncertain).sum() + (found.abs() * there).sum() / there.sum() + penalty


def quotients(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Averages over averages, inverses and counts: of what two masks leave."""
    far, there = batch["target"].abs() > 1, (batch["target"] > 0).to(outputs.dtype)
    distance = (outputs - batch["target"]).square()
    first = (distance * there).mean() / (there.mean() + 1e-3) + distance.mean() / there[:, 0].mean()
    return first + (distance * there).sum() * (2 / there.sum()) + (outputs.abs() * far).sum() / far.count_nonzero()


CLASSES = torch.linspace(0.25, 3, 18, dtype=torch.float64)


def by_class(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Classes of unequal weights, at places of which some are ignored, and of a sample."""
    labels, weights = batch["target"].argmax(-1), CLASSES.to(outputs.dtype)
    places = nn.functional.cross_entropy(outputs.mT, labels, weight=weights, ignore_index=3)
    return places + nn.functional.nll_loss(outputs[:, 0].log_softmax(-1), labels[:, 0], weight=weights)


def weighed_classes(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """One such average, smoothed, by weights that the model keeps: the program divides by its weight."""
    found, weights = outputs
    criterion = nn.CrossEntropyLoss(weight=weights, ignore_index=3, label_smoothing=0.1)
    return criterion(found.flatten(0, 1), batch["target"].argmax(-1).flatten())


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(30), nn.Linear(30, 46), nn.Linear(46, 30)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Regression(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Layer() for _ in range(layers)), nn.Linear(30, 18)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return self.head(features)


def regression(layers: int = 4) -> nn.Module:
    """From [batch, 12, 30] to [batch, 12, 18]."""
    return _Regression(layers)


class _Weighed(_Regression):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.uncertain = nn.Parameter(torch.tensor([0.3, -0.7]))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(features), self.uncertain, 0.01 * self.layers[0].up.weight.square().sum()


def weighed_regression(layers: int = 4) -> nn.Module:
    """The same, which returns learned weights and a penalty besides."""
    return _Weighed(layers)


class _Classes(_Regression):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.register_buffer("classes", CLASSES.to(torch.get_default_dtype()))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(features), self.classes


def classifier(layers: int = 4) -> nn.Module:
    """The same, which returns weights of its classes besides."""
    return _Classes(layers)
