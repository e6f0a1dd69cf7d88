"""Large tensors: what a model file makes for real may not fill the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 28
"""Elements of a tensor that is made for real, at most: 1 GiB in float32."""


class LargeError(Exception):
    """An operation would have made a tensor of more than LARGE elements."""


class RefuseLarge(TorchDispatchMode):
    """Raises LargeError before an operation makes a tensor of more than LARGE elements, with which no memory is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not (func._schema.is_mutable or func.is_view) and self._is_large(func, args, given):
            raise LargeError(f"{func} makes more than {LARGE:,} elements")
        return func(*args, **given)

    def _is_large(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            with self.fake:
                made = func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - its shape depends on values, or the operation itself will say what is wrong
            return False
        return any(isinstance(leaf, Tensor) and leaf.numel() > LARGE for leaf in tree_leaves(made))
