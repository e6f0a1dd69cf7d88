"""How often something runs or how large it is: a trace unrolls loops and fixes shapes, and no two micro-batches need to have as
many samples, or the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode

from planner.ir.errors import ModelError
from planner.trace.lines import running_line

MANY = 64
"""Parts of a batch that code may take by their numbers: more are a loop. (What blends those few is refused for that.)"""


class RefuseSampleLoops(TorchFunctionMode):
    """Raises ModelError where code takes a tensor apart sample by sample, before a loop over all of ``batch`` has run, and
    where it makes one whose shape depends on values."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = kwargs or {}, getattr(function, "__name__", "")
        if args and isinstance(args[0], Tensor) and args[0].dim() and self._by_sample(name, args, given):
            raise ModelError(running_line(), "goes through the samples of the batch one by one",
                             "compute all of them at once, or give torch.vmap what one sample needs")
        if name in _RECURRENT and isinstance(args[0], Tensor) and self._by_steps(args):
            raise ModelError(running_line(), f"{name} takes the samples for time steps", "give it batch_first=True")
        result = function(*args, **given)
        if isinstance(result, (Tensor, tuple, list)):
            refuse_unknown_shapes(result if isinstance(result, (tuple, list)) else (result,), name.strip("_"))
        return result

    def _by_steps(self, args: Sequence[Any]) -> bool:
        """Whether a recurrent layer would go through the batch (of packed sequences it is not known)."""
        steps_first = len(args) == 9 and args[-1] is False  # (input, states, parameters, ..., batch_first)
        return bool(steps_first and args[0].dim() == 3 and args[0].shape[0] % self.batch == 0)

    def _by_sample(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        if name in _COUNTS:
            dim, parts = _COUNTS[name](*args, **given)
        elif name in _PLACES:
            dim, place = _PLACES[name](*args, **given)
            parts = place % self.batch if place > 0 else 0  # Where one batch ends and another begins is no sample's place.
        else:
            return False
        return parts > MANY and args[0].shape[dim] % self.batch == 0


def refuse_unknown_shapes(results: Sequence[object], name: str, place: str | None = None) -> None:
    """Raise ModelError where an operation returns a tensor whose number of elements only the values of its operands tell.
    ``place``: the line, where it is not the one that runs."""
    for result in results:
        shape: Sequence[Any] = result.shape if isinstance(result, Tensor) else ()
        if any(isinstance(extent, SymInt) and extent.node.maybe_as_int() is None for extent in shape):
            raise ModelError(place or running_line(), f"the shape of what {name} returns depends on values",
                             "a trace fixes shapes: multiply by the mask, and divide by its sum")


def _unbind(tensor: Tensor, dim: int = 0) -> tuple[int, int]:
    return dim, tensor.shape[dim]


def _split(
    tensor: Tensor, size: object = None, dim: int = 0, *, split_size: object = None, split_size_or_sections: object = None
) -> tuple[int, int]:
    sizes = size or split_size or split_size_or_sections
    return dim, -(-tensor.shape[dim] // sizes) if isinstance(sizes, int) else len(sizes) if isinstance(sizes, Sequence) else 0


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[int, int]:
    return dim, chunks


def _select(tensor: Tensor, dim: int, index: int) -> tuple[int, int]:
    return dim, index


def _item(tensor: Tensor, index: object) -> tuple[int, int]:
    first = index[0] if isinstance(index, tuple) and index else index
    start = first.start if isinstance(first, slice) else first
    return 0, start if isinstance(start, int) else 0


_COUNTS: Mapping[str, Callable[..., tuple[int, int]]] = {"unbind": _unbind, "split": _split, "chunk": _chunk}
"""By function, the dim that it takes apart and how many parts it makes."""
_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
_PLACES: Mapping[str, Callable[..., tuple[int, int]]] = {"select": _select, "__getitem__": _item}
"""By function, the dim that it takes from and where what it takes begins."""
