"""The global random generators of torch, numpy and Python that a model's code may draw from.

torch's draws are operations of the trace. Those of numpy and Python are numbers to it, the same ones in every step of a
program: what they change is looked for by running the step once more under other draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

ALIKE_DRAWS = 1_000
"""Draws that are all the lowest or all the highest; then they are random again, for a loop may wait for another."""


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Within, torch's, numpy's and Python's global generators begin with the seed; after it they are as they were."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)


def foreign_state() -> tuple[object, ...]:
    """Where numpy's and Python's generators are: another after every draw."""
    name, keys, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, bytes(np.asarray(keys)), position, *rest


def other_draws() -> tuple[AbstractContextManager[object], ...]:
    """Draws unlike those of ``seeded()``: others, the lowest there are, and the highest. (What happens once in a hundred
    steps, as layers that are dropped at random, happens under one of the last two.)"""
    return seeded(1), _extreme(0.0), _extreme(1.0 - 2.0**-53)


@contextmanager
def _extreme(value: float) -> Iterator[None]:
    """Within, numbers in [0, 1) that numpy's and Python's generators draw are this one, unless code seeds them itself."""
    pythons = _Extreme(value).of(random, "random")
    numpys = _Extreme(value).of(np.random, "random", "random_sample", "rand")
    with seeded(), mock.patch.dict(vars(random), pythons), mock.patch.dict(vars(np.random), numpys):
        yield


class _Extreme:
    """Functions in place of a generator's own."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.left = ALIKE_DRAWS

    def of(self, generator: ModuleType, *drawing: str) -> dict[str, Callable[..., Any]]:
        """``drawing``: the functions that draw from [0, 1)."""
        return {
            "seed": partial(self._seed, generator.seed), "uniform": partial(self._between, generator.uniform),
            **{name: partial(self._drawn, getattr(generator, name)) for name in drawing},
        }

    def _seed(self, seed: Callable[..., None], *given: Any, **named: Any) -> None:
        self.left = 0
        seed(*given, **named)

    def _drawn(self, draw: Callable[..., Any], *given: Any, **named: Any) -> Any:
        real = draw(*given, **named)
        self.left -= 1
        return real if self.left < 0 else real * 0.0 + self.value

    def _between(self, draw: Callable[..., Any], low: Any = 0.0, high: Any = 1.0, *given: Any, **named: Any) -> Any:
        return low + (high - low) * self._drawn(draw, 0.0, 1.0, *given, **named)
