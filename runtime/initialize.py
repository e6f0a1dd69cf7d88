"""Initial values that depend on (seed, FQN) alone: the same weights under every plan, each rank making only its part.

A parameter's recipe is replayed over the flattened whole tensor in chunks of fixed size, each with a generator of its
own seeded by (seed, FQN, chunk); a copy's by the FQN of the parameter whose numbers the model gave it. Floats are drawn
in float32 on the CPU (float64 in float64) and cast to the parameter's dtype.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .block import blocks_of
from .hashing import seed_of
from .layout import Box
from .parameters import Held, as_dtype, held_by, piece

CHUNK = 2**20
Step = Sequence[float | int | str]
"""(operation, *arguments): normal(mean, std), uniform(low, high), trunc_normal(mean, std, low, high), constant(value),
scale(factor), shift(amount), zero_row(index), value(little-endian bytes in base64, their dtype: the parameter's own
where there is none), draws_of(name): what follows draws as the parameter of that name does, which has as many elements"""


def initialize(
    modules: Iterable[nn.Module], recipes: Mapping[str, Sequence[Step]] | None, seed: int, device: torch.device
) -> None:
    """Give the stage modules memory on ``device`` (ZeRO already applied: local rows only) and their initial values
    (``recipes`` None: none; a rehearsal's tensors have no elements)."""
    modules = tuple(modules)
    for module in modules:
        module.to_empty(device=device)
        for block in blocks_of(module):
            block.fill_constants()
    if recipes is None:
        return
    with torch.no_grad():
        for held in held_by(modules):
            _fill(held, recipes[held.fqn], seed)


def initial_value(fqn: str, shape: Sequence[int], dtype: torch.dtype, recipe: Sequence[Step], seed: int) -> Tensor:
    """The whole initial tensor of one parameter, on the CPU."""
    shape = tuple(shape)
    chunks = [_chunk(fqn, shape, dtype, recipe, seed, index) for index in range(-(-math.prod(shape) // CHUNK))]
    return torch.cat(chunks).reshape(shape) if chunks else torch.empty(shape, dtype=dtype)


def _fill(held: Held, recipe: Sequence[Step], seed: int) -> None:
    local, shape = held.local, held.layout.shape
    runs = [run for box in held.boxes for run in _runs(box, shape)]
    kept: tuple[int, Tensor] | None = None
    for begin, length, offsets in sorted(runs):
        parts = []
        for index in range(begin // CHUNK, (begin + length - 1) // CHUNK + 1):
            if kept is None or kept[0] != index:
                kept = index, _chunk(held.fqn, shape, local.dtype, recipe, seed, index)
            first = max(begin - index * CHUNK, 0)
            parts.append(kept[1][first : begin + length - index * CHUNK])
        values = torch.cat(parts)
        _write(local, offsets, values)


def _runs(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """The stretches of the flattened whole tensor that a box is made of: (start, length, ((local offset, size), ...)).

    The last dims that the box covers wholly, and the one before them, make one stretch.
    """
    offsets, sizes, local = box
    split = len(shape)
    while split > 0 and sizes[split - 1] == shape[split - 1]:
        split -= 1
    outer = max(split - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[outer:])
    runs = []
    for flat in range(math.prod(sizes[:outer])):
        index: list[int] = []
        rest = flat
        for extent in reversed(sizes[:outer]):
            rest, position = divmod(rest, extent)
            index.insert(0, position)
        index += [0] * (len(shape) - outer)
        start = sum((offset + at) * stride for offset, at, stride in zip(offsets, index, strides, strict=True))
        where = tuple(
            (begin + at, 1 if dim < outer else size)
            for dim, (begin, at, size) in enumerate(zip(local, index, sizes, strict=True))
        )
        runs.append((start, length, where))
    return runs


def _write(local: Tensor, where: tuple[tuple[int, int], ...], values: Tensor) -> None:
    sizes = tuple(size for _, size in where)
    target = piece(local, (sizes, sizes, tuple(offset for offset, _ in where)))
    target.copy_(values.reshape(sizes))


def _chunk(
    fqn: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: Sequence[Step], seed: int, index: int
) -> Tensor:
    """Elements [index x CHUNK, (index + 1) x CHUNK) of the flattened whole tensor."""
    begin = index * CHUNK
    values = torch.zeros(min(CHUNK, math.prod(shape) - begin), dtype=dtype if dtype == torch.float64 else torch.float32)
    generator = torch.Generator().manual_seed(seed_of("initial", seed, fqn, index))
    for operation, *arguments in recipe:
        if operation == "draws_of":
            generator.manual_seed(seed_of("initial", seed, str(arguments[0]), index))
        elif operation == "zero_row":
            _zero_row(values, begin, shape, int(arguments[0]))
        elif operation == "value":
            written = as_dtype(str(arguments[1])) if len(arguments) > 1 else dtype
            values = _decode(str(arguments[0]), written)[begin : begin + CHUNK].to(values.dtype)
        else:
            _draw(values, str(operation), [float(argument) for argument in arguments], generator)
    return values.to(dtype)


def _draw(values: Tensor, operation: str, arguments: Sequence[float], generator: torch.Generator) -> None:
    if operation == "normal":
        values.normal_(*arguments, generator=generator)
    elif operation == "uniform":
        values.uniform_(*arguments, generator=generator)
    elif operation == "trunc_normal":
        mean, std, low, high = arguments
        nn.init.trunc_normal_(values, mean, std, low, high, generator=generator)
    elif operation == "constant":
        values.fill_(arguments[0])
    elif operation == "scale":
        values.mul_(arguments[0])
    elif operation == "shift":
        values.add_(arguments[0])
    else:
        raise ValueError(f"unknown initialisation step {operation!r}")


def _zero_row(values: Tensor, begin: int, shape: tuple[int, ...], row: int) -> None:
    width = math.prod(shape[1:])
    start = (row % shape[0]) * width - begin
    values[max(start, 0) : max(start + width, 0)] = 0.0


def _decode(data: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype)


def decode_constant(data: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A constant from its little-endian row-major bytes in base64."""
    raw = bytearray(base64.b64decode(data))
    return torch.frombuffer(raw, dtype=dtype).reshape(tuple(shape)) if raw else torch.empty(tuple(shape), dtype=dtype)
