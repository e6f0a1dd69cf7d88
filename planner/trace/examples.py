"""What example inputs show: how large whole numbers are, where the model's code does not say it, and what floats are like."""

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
NORMAL: tuple[str | float, ...] = ("normal",)


def examples(source: ModelSource, dtype: str, sequence: int | None, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Real values of a few samples, drawn with seed 0, as ``example_inputs`` gives them; nothing where it gives none.

    ``batch``: its inputs as they are traced, which hold no values.
    """
    elements = sum(math.prod(tensor.shape[1:]) for tensor in batch.values())
    samples = min(SAMPLES, MOST // max(elements, 1))
    if source.example_inputs is None or samples < 1:
        return {}
    unheard = io.StringIO()
    with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with default_dtype(getattr(torch, dtype)):
                given = source.example_inputs(samples, sequence)
            return {name: given[name].detach().cpu() for name in batch if given[name].numel()}
        except Exception:  # noqa: BLE001 - the user's code; without an example there is none
            return {}


def shown(given: Mapping[str, Tensor]) -> dict[str, int]:
    """One more than the largest of every input of whole numbers."""
    largest = {name: int(values.max()) for name, values in given.items() if _is_whole(values)}
    return {name: number + 1 for name, number in largest.items() if number >= 0}


def likenesses(given: Mapping[str, Tensor]) -> dict[str, tuple[str | float, ...]]:
    """What the floats of every input are like."""
    return {name: likeness(values) for name, values in given.items() if values.is_floating_point()}


def likeness(values: Tensor) -> tuple[str | float, ...]:
    """``("constant", c)``: nothing but c; ``("mask",)``: zeros and ones; ``("unit",)``: from 0 to 1; ``("positive",)``: never
    negative; ``("normal",)``: anything else, and zeros alone, which are given for their shape. Coarse on purpose: the graph of
    a model must not depend on what its example happens to draw."""
    if not values.numel() or not values.isfinite().all() or not values.any():
        return NORMAL
    first = float(values.flatten()[0])
    if bool((values == first).all()):
        return "constant", first
    if float(values.min()) < 0:
        return NORMAL
    if bool(((values == 0) | (values == 1)).all()):
        return ("mask",)
    return ("unit",) if float(values.max()) <= 1 else ("positive",)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
