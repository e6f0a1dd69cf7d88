"""Example inputs, and what they show: how large whole numbers are, where the model's code does not say it, and what floats are
like."""

from __future__ import annotations

import contextlib
import io
import keyword
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.ir.errors import ModelError
from planner.ir.types import DTYPE_BYTES
from planner.trace.dtypes import name_of
from planner.trace.generators import seeded
from planner.trace.large import RefuseLarge
from planner.trace.lines import first_line, users_line
from planner.trace.recipes import default_dtype
from planner.trace.source import ModelSource

FEW = (2, 3)
"""Numbers of samples that example inputs are drawn for: nothing but the first dim may tell them apart."""
SAMPLES, MOST = 64, 1 << 24
"""Of how many samples values are looked at, and of how many elements at most."""
NORMAL: tuple[str | float, ...] = ("normal",)


def example_inputs(source: ModelSource, dtype: str, sequence: int | None) -> dict[str, Tensor]:
    """Inputs of a few samples, without values: like what ``example_inputs`` gives, or as a language model takes them.

    It is called for few samples because it may loop over them, or read them from a file. Raises ModelError where it fails,
    or where something else than the first dim depends on their number.
    """
    if source.example_inputs is None:
        if sequence is None:
            raise ModelError("--seq", "is not given", "a language model needs the number of tokens of a sample")
        shape = FEW[0], sequence
        return {name: torch.empty(shape[:dims], dtype=torch.int64, device="meta") for name, dims in source.inputs.items()}
    first, second = (_called(source, dtype, sequence, samples) for samples in FEW)
    told = f"with a batch of {FEW[0]}", f"of {FEW[1]}"
    if list(first) != list(second):
        raise ModelError(source.where, f"example_inputs: gives {', '.join(first)} {told[0]}, {', '.join(second)} {told[1]}",
                         "the names must be the same for every batch")
    for name, tensor in first.items():
        other = second[name]
        if tensor.shape[1:] != other.shape[1:] or tensor.dtype != other.dtype:
            has = [f"{_shape(given)} in {name_of(given.dtype)}" for given in (tensor, other)]
            raise ModelError(source.where, f"example_inputs: {name} has shape {has[0]} {told[0]}, {has[1]} {told[1]}",
                             "only the first dim may depend on the batch")
    return first


def _called(source: ModelSource, dtype: str, sequence: int | None, samples: int) -> dict[str, Tensor]:
    try:
        given = _small_or_fake(source, dtype, sequence, samples)
    except (Exception, SystemExit) as error:  # user code
        right = "give --seq, which example_inputs is called with" if sequence is None and "None" in str(error) else ""
        folder = source.file.path.parent if source.file else None  # The user's line, not a library's that it called.
        raise ModelError(users_line(error, folder) or source.where,
                         f"example_inputs failed: {type(error).__name__}: {first_line(error)}", right) from error
    if not isinstance(given, Mapping) or not given or not all(isinstance(value, Tensor) for value in given.values()):
        raise ModelError(source.where, "example_inputs(batch, seq) returned no dict of tensors")
    for name, tensor in given.items():
        if not str(name).isidentifier() or keyword.iskeyword(str(name)):
            raise ModelError(source.where, f"example_inputs: the key {name!r} is no name of an argument",
                             "give an identifier that is no keyword of Python")
        _check_kind(source, name, tensor)
        if not tensor.dim() or tensor.shape[0] != samples:
            raise ModelError(source.where, f"example_inputs: {name} has shape {_shape(tensor)} with a batch of {samples}",
                             "the first dim must be the batch")
    return {str(name): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in given.items()}


def _check_kind(source: ModelSource, name: object, tensor: Tensor) -> None:
    """Refuse what no graph holds and no program feeds."""
    if tensor.is_nested or tensor.layout != torch.strided:
        has = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ModelError(source.where, f"example_inputs: {name} is a {has} tensor",
                         "give a dense one, all samples padded to one shape")
    if name_of(tensor.dtype) not in DTYPE_BYTES:
        raise ModelError(source.where, f"example_inputs: {name} is {name_of(tensor.dtype)}",
                         f"give it in one of {', '.join(DTYPE_BYTES)}")


def _small_or_fake(source: ModelSource, dtype: str, sequence: int | None, samples: int) -> Any:
    """What ``example_inputs`` gives, for real: the file may keep what it makes, for its next call or for forward. Only a sample
    of a billion tokens, or one for a device that is not here, is fake, and then the file's that is run for it alone."""
    with contextlib.suppress(Exception), RefuseLarge():
        return _drawn(source, dtype, sequence, samples)
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        return _drawn(source.anew(), dtype, sequence, samples)
    return _drawn(source, dtype, sequence, samples)


def _drawn(source: ModelSource, dtype: str, sequence: int | None, samples: int) -> Any:
    unheard = io.StringIO()
    quiet = contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard)
    with quiet[0], quiet[1], seeded(), default_dtype(getattr(torch, dtype)):
        return source.example_inputs(samples, sequence) if source.example_inputs is not None else {}


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def examples(source: ModelSource, dtype: str, sequence: int | None, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """More of the same, as far as they are not too large: whose values are looked at. ``inputs``: a few of them. Nothing where
    the file gives none; where it has fewer, half as many, and so on."""
    elements = sum(math.prod(tensor.shape[1:]) for tensor in inputs.values())
    samples = min(SAMPLES, MOST // max(elements, 1))
    while source.example_inputs is not None and samples:
        with contextlib.suppress(Exception):  # the user's code; without an example there is none
            given = _drawn(source, dtype, sequence, samples)
            return {name: given[name].detach().cpu() for name in inputs if given[name].numel()}
        samples //= 2
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
