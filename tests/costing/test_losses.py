"""What the runtime's cross-entropy holds while it runs, against torch's own storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.costing.losses import vocabulary_bytes
from runtime import vocabulary


class Most(TorchDispatchMode):
    """Bytes of the storages that are made, at most."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in given}
        self._now = self.bytes = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.bytes = max(self.bytes, self._now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(32, 64), (30, 64), (32, 8), (32, 2), (7, 4, 5), (64,)])
@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_a_split_vocabulary(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: tuple[int, ...], rows: int) -> None:
    """``rows``: of a piece."""
    at_once = rows * torch.Size(sizes[1:]).numel()
    monkeypatch.setattr("planner.costing.losses.AT_ONCE", at_once)
    monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
    monkeypatch.setattr(vocabulary, "all_reduce", lambda x, operation, group: x.clone())
    logits = torch.randn(sizes, dtype=dtype, requires_grad=True)
    target = torch.zeros(sizes[:1] + sizes[2:] if len(sizes) > 1 else (), dtype=torch.int64)
    with Most([logits, target]) as most:
        vocabulary.CrossEntropy.apply(logits, target, "tensor", 0, sizes[1 if len(sizes) > 1 else 0], -100)
    assert most.bytes == vocabulary_bytes(sizes, max(4, dtype.itemsize))
