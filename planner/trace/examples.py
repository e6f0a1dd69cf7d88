"""What example inputs show of whole numbers: the model's code may say of none how large they may be."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from planner.trace.load import ModelSource
from planner.trace.recipes import default_dtype

SAMPLES, MOST = 64, 1 << 24
"""How many samples are looked at, and of how many elements at most."""


def shown(source: ModelSource, dtype: str, sequence: int | None, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """One more than the largest of every input of whole numbers, as ``example_inputs`` gives them; nothing where it gives none.

    ``batch``: its inputs as they are traced, which hold no values.
    """
    whole = [name for name, tensor in batch.items() if _is_whole(tensor)]
    elements = sum(math.prod(tensor.shape[1:]) for tensor in batch.values())
    samples = min(SAMPLES, MOST // max(elements, 1))
    if source.example_inputs is None or not whole or samples < 1:
        return {}
    unheard = io.StringIO()
    with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with default_dtype(getattr(torch, dtype)):
                given = source.example_inputs(samples, sequence)
            largest = {name: int(given[name].max()) for name in whole if given[name].numel()}
        except Exception:  # noqa: BLE001 - the user's code; without an example there is none
            return {}
    return {name: number + 1 for name, number in largest.items() if number >= 0}


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
