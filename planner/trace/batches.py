"""Numbers that Python computes from the number of samples: a trace holds those of its own batch, and a program has others.

The model runs once more, on a batch of few samples and without an export. It has to call the same functions on the same
tensors, with the same numbers, but for multiples of the batch, which stand for the same multiples of any other. What it calls
is what a mode sees: torch's own functions are taken to do the same whatever the batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from planner.ir.errors import ModelError
from planner.trace.generators import foreign_state
from planner.trace.lines import running_line, users_line

FEW = (2, 3, 5, 7, 11, 13, 17, 19, 23)
"""Numbers of samples of the second batch: the first that is no size of the model."""

MANY = 1 << 14
"""Items of a list, or numbers of an array, that are looked at one by one: the rows of a million samples take minutes."""

SAMPLES = "the number of samples"

ADVICE = "a plan divides the batch in many ways: compute with tensors, or return (sum, weight) from loss() to average"


@dataclass(frozen=True)
class Called:
    """A call of one of torch's functions. ``given``: its arguments, tensors by what tells them apart. ``place``: the line."""

    name: str
    given: object
    place: str


@dataclass(frozen=True)
class _Known:
    """A tensor: a parameter's or buffer's name, or the number of the first call that it came from or went into."""

    said: str | int


class Record(TorchFunctionMode):
    """Writes down what a step calls, a pass of a model. ``draws``: whether it draws from numpy's or Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []
        self.draws = False
        self._known: dict[int, _Known] = {}
        self._kept: list[Tensor] = []  # so that no other tensor takes its identity
        self._numbers = count()
        self._around = 0  # torch's dispatch modes

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Write anew, and call the model's tensors by their names."""
        self.calls.clear()
        self._numbers = count()
        self._around = torch._C._len_torch_dispatch_stack()
        self._kept += [tensor for _, tensor in _named(model)]
        self._known |= {id(tensor): _Known(name) for name, tensor in _named(model)}
        before = foreign_state()
        try:
            with self:
                yield
        finally:
            self.draws = foreign_state() != before
            self._known.clear()
            self._kept.clear()

    def fails(self, error: Exception, where: str) -> None:
        """Write down that the step ends in an error."""
        self.calls.append(Called(type(error).__name__, (), users_line(error) or where))

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        stands = (getattr(function, "__module__", "") or "").endswith(".shardwright")  # for a repeated module
        # What a dispatch mode calls, as it does where an autograd.Function changes a view, depends on what it has seen before.
        if stands or torch._C._len_torch_dispatch_stack() < self._around:
            return function(*args, **named)
        given = self._said((args, named))
        result = function(*args, **named)
        name = getattr(function, "__name__", "")
        if name == "dropout" and result is args[0]:  # of nothing, which an export makes a tensor of its own
            result = result.view_as(result)
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        changes = result is None and function.__name__ != "__get__"
        if changes or self._made(result):
            self.calls.append(Called(name, given, running_line()))
        return result

    def _tensor(self, tensor: Tensor) -> _Known:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = _Known(next(self._numbers))
            self._kept.append(tensor)
        return self._known[id(tensor)]

    def _made(self, result: Any) -> bool:
        """Whether a result holds tensors, which are known from now on."""
        if isinstance(result, Tensor):
            self._tensor(result)
            return True
        return isinstance(result, (tuple, list)) and True in list(map(self._made, result))

    def _said(self, value: Any) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)):
            length = (len(value),) if len(value) > MANY else ()
            return (*length, *map(self._said, value[:MANY]))
        if isinstance(value, slice):
            return self._said((value.start, value.stop, value.step))
        if isinstance(value, Mapping):
            return tuple((key, self._said(item)) for key, item in value.items())
        if isinstance(value, (np.generic, np.ndarray)):
            numbers = value.tolist() if value.size <= MANY else hashlib.sha256(value.tobytes()).hexdigest()
            return self._said((value.shape, numbers))
        if isinstance(value, range):
            return self._said((value.start, value.stop, value.step))
        return value if isinstance(value, (bool, int, float, str)) or value is None else type(value)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@dataclass(frozen=True)
class Scale:
    """Two batches' numbers of samples."""

    first: int
    second: int

    def fits(self, first: object, second: object) -> bool:
        """Whether a number is the same in both, or the same multiple of their batches; and so for all that values hold."""
        if isinstance(first, tuple) and isinstance(second, tuple):
            return len(first) == len(second) and all(map(self.fits, first, second))
        if type(first) is int and type(second) is int and first and first % self.first == 0:
            return second == first // self.first * self.second
        return type(first) is type(second) and (first == second or (first != first and second != second))


@dataclass(frozen=True)
class Difference:
    """Where two runs of a step part: ``place``: the line; ``said``: what parts there, up to the cause."""

    place: str
    said: str

    def caused_by(self, cause: str, remedy: str) -> ModelError:
        """The refusal of a step of which a trace would keep one run."""
        return ModelError(self.place, f"{self.said} {cause}", remedy)


def difference(first: Sequence[Called], second: Sequence[Called], scale: Scale) -> Difference | None:
    """Where two runs of a step, on two batches, part; None where they call the same."""
    for at, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None or one.name != other.name:
            longer = second if len(second) > len(first) else first
            return Difference(longer[at].place, "which operations run depends on")
        if not scale.fits(one.given, other.given):
            numbers = next(_differing(one.given, other.given, scale), None)
            what = f"number {numbers} in {one.name}" if numbers is not None else f"operand of {one.name}"
            return Difference(one.place, f"the {what} is computed from")
    return None


def _differing(first: object, second: object, scale: Scale) -> Iterator[object]:
    """The numbers that differ."""
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for one, other in zip(first, second, strict=True):
            yield from _differing(one, other, scale)
    elif isinstance(first, (bool, int, float)) and not scale.fits(first, second):
        yield first


def few(sizes: Sequence[int]) -> int:
    """How many samples the second batch has, where these sizes are the model's."""
    return next((number for number in FEW if number not in sizes), FEW[0])
