"""seeded: one state of every generator that a model's code may draw from, so that a trace is the same each time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded() -> Iterator[None]:
    """Within, torch's, numpy's and Python's global generators begin with seed 0; after it they are as they were."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)
