"""Bytes alive on one rank, by category, and what they were when most."""

from __future__ import annotations

from typing import Literal

Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers")


class Heap:
    """``now``: bytes by category; ``peak``: the same when their sum, ``total``, was highest, ``most``. ``held``: bytes that a
    rehearsal does not see, ``most_held``: the highest sum of both."""

    def __init__(self) -> None:
        self.now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.now)
        self.total = self.most = self.held = self.most_held = 0

    def add(self, category: Category, size: int) -> None:
        """Something is made (or, negative, freed)."""
        self.now[category] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.now)
        self.most_held = max(self.most_held, self.total + self.held)

    def passing(self, **sizes: int) -> None:
        """Something is made and gone again."""
        total = self.total + sum(sizes.values())
        if total > self.most:
            self.most = total
            self.peak = {name: size + sizes.get(name, 0) for name, size in self.now.items()}
        self.most_held = max(self.most_held, total + self.held)
