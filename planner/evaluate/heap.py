"""Bytes alive on one rank, by category, and what they were when most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Peak:
    """``at``: bytes by category when their sum was highest; ``most_held``: the highest sum with what no rehearsal sees."""

    at: dict[Category, int]
    most_held: int

    @property
    def most(self) -> int:
        return sum(self.at.values())


class Heap:
    """``now``: bytes by category; ``peak``: the same when their sum, ``total``, was highest, ``most``. ``held``: bytes that a
    rehearsal does not see, ``most_held``: the highest sum of both. All since the last :meth:`turn`; ``phases``: before it."""

    def __init__(self) -> None:
        self.now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.now)
        self.total = self.most = self.held = self.most_held = 0
        self.phases: list[Peak] = []

    def add(self, category: Category, size: int) -> None:
        """Something is made (or, negative, freed)."""
        self.now[category] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.now)
        self.most_held = max(self.most_held, self.total + self.held)

    def turn(self) -> None:
        """Another phase begins, with a peak of its own."""
        self.phases.append(Peak(dict(self.peak), self.most_held))
        self.most, self.peak, self.most_held = self.total, dict(self.now), self.total + self.held

    def passing(self, **sizes: int) -> None:
        """Something is made and gone again."""
        total = self.total + sum(sizes.values())
        if total > self.most:
            self.most = total
            self.peak = {name: size + sizes.get(name, 0) for name, size in self.now.items()}
        self.most_held = max(self.most_held, total + self.held)
