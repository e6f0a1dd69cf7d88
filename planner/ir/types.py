"""Extents, tensor types and the literals that a node's arguments may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}
HALF = frozenset({"bfloat16", "float16"})
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "complex64", "complex128"})
"""What gradients flow through: real and complex numbers."""


def summed_in(dtype: str) -> str:
    """What a softmax or cross-entropy sums a dtype in across ranks: float32 for half precisions (runtime/vocabulary.py)."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


@dataclass(frozen=True, slots=True, order=True)
class BatchMultiple:
    """An extent proportional to the batch of one forward call: ``factor * batch`` (a flattened [batch, seq] is seq*B)."""

    factor: int

    def __str__(self) -> str:
        return "B" if self.factor == 1 else f"{self.factor}B"


Extent: TypeAlias = int | BatchMultiple


def resolve(extent: Extent, batch: int) -> int:
    """The extent in elements for a forward call of ``batch`` samples."""
    return extent.factor * batch if isinstance(extent, BatchMultiple) else extent


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape (symbolic in the batch) and dtype (torch's name without the prefix: ``float32``, ``int64``, ``bool``)."""

    shape: tuple[Extent, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATING

    @property
    def batched(self) -> bool:
        """Whether it has something of every sample."""
        return any(isinstance(extent, BatchMultiple) for extent in self.shape)

    def sizes(self, batch: int) -> tuple[int, ...]:
        # What is measured asks for nothing as often: no function is called for plain extents.
        return tuple([extent if type(extent) is int else resolve(extent, batch) for extent in self.shape])

    def elements(self, batch: int = 1) -> int:
        return math.prod(self.sizes(batch))

    def size_bytes(self, batch: int = 1) -> int:
        return self.elements(batch) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class RankSize:
    """An extent that depends on the rank: the own part of ``extent`` elements, split segment by segment (none: in one) in
    multiples of ``unit``. Appears only in localised arguments."""

    extent: int
    unit: int
    segments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is another value: a node, a block input, a parameter or a buffer, by its name in the body."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """An argument that is a dtype."""

    name: str

    def __str__(self) -> str:
        return self.name


# Devices, layouts and memory formats are dropped by the tracer: they are the running program's business.
Argument: TypeAlias = "Ref | Dtype | BatchMultiple | bool | int | float | str | tuple[Argument, ...] | None"


LocalArgument: TypeAlias = "Argument | RankSize | tuple[LocalArgument, ...]"


def exact(argument: Argument) -> object:
    """What tells arguments apart that Python takes for equal: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(argument, tuple):
        return tuple(map(exact, argument))
    return type(argument), argument.hex() if isinstance(argument, float) else argument


def references(argument: Argument) -> tuple[str, ...]:
    """Names of the values an argument mentions, in order of appearance (with repetitions)."""
    if isinstance(argument, Ref):
        return (argument.name,)
    if isinstance(argument, tuple):
        return tuple(name for item in argument for name in references(item))
    return ()
