"""Gradients in memory of their own: what is added to one in place, or multiplied, changes nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class OwnMemory:
    """Which memory has been given to gradients. ``others``: tensors in whose memory no gradient may lie: what came into a
    backward pass or goes out of it is in buffers that are written again, or on its way."""

    def __init__(self, others: Iterable[Tensor | None] = ()) -> None:
        self._others = {_storage(tensor) for tensor in others if tensor is not None}
        self._given: dict[int, list[tuple[int, int]]] = {}

    def give(self, gradient: Tensor) -> Tensor:
        """The gradient, or a copy where it lies in another's memory, as both gradients of ``a + b`` may, in an earlier one's,
        or over itself (expanded). Parts of a storage that have none in common (of ``cat``) are apart."""
        if self._is_held(gradient):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._given.setdefault(_storage(gradient), []).append(_extent(gradient))
        return gradient

    def _is_held(self, gradient: Tensor) -> bool:
        if any(size > 1 and not stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True)):
            return True
        storage, (first, end) = _storage(gradient), _extent(gradient)
        return storage in self._others or any(
            first < other_end and other_first < end for other_first, other_end in self._given.get(storage, ())
        )


def own_gradients(parameters: Iterable[nn.Parameter], others: Iterable[Tensor | None] = ()) -> None:
    """Copy the gradients that a first backward pass has left in memory that is not theirs alone; see :class:`OwnMemory`.

    torch's accumulation takes the first gradient of a parameter as it is where nobody else holds that tensor; who holds its
    memory it does not ask (``accumulate_grad.h``). So ``a[None] + b[None]`` leaves two views of one storage: gradients of later
    micro-batches would be added twice. Shards have memory of their own."""
    memory = OwnMemory(others)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and not isinstance(gradient, DTensor):
            owned = memory.give(gradient)
            if owned is not gradient:
                parameter.grad = owned


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    first, item = int(tensor.storage_offset()), tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first * item, (first + reach if tensor.numel() else first) * item
