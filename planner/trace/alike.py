"""Calls of modules that are alike: all that a module's closed code can see of itself and its arguments is equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from planner.trace.closed import ClosedCode, is_constant, is_torch_class, is_torch_function

_BLANK = frozenset(vars(nn.Module()))
"""What every module holds beside its own attributes."""


class Incomparable(Exception):
    """A module or an argument holds what cannot be compared, or could change."""


@dataclass(frozen=True)
class Call:
    """A call of a module. ``key``: equal for calls that are alike. ``inputs``: the tensors among the arguments, ``own``:
    the module's parameters and buffers, both in an order that calls of one key share."""

    key: object
    inputs: tuple[Tensor, ...]
    own: tuple[Tensor, ...]


class Calls:
    """Makes calls comparable. ``held``: attributes that every fake tensor or parameter has; a model may hang more on one."""

    def __init__(self) -> None:
        self.code = ClosedCode()
        with FakeTensorMode():
            self.held = vars(torch.empty(0)).keys() | {"_is_param"}

    def of(
        self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], ignored: object = None
    ) -> Call | None:
        """A call as it can be compared; None where it cannot. ``ignored``: an attribute value that is no state."""
        view = _View(self, ignored)
        with torch._C.DisableTorchFunction():
            try:
                modes = _modes()
                state = view.state(module)
                own = len(view.tensors)
                arguments = (tuple(map(view.value, args)), tuple((key, view.value(value)) for key, value in kwargs.items()))
            except Incomparable:
                return None
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(item), index) for index, item in enumerate(view.objects))
        return Call((modes, state, arguments, same), tuple(view.tensors[own:]), tuple(view.tensors[:own]))

    def alike(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether tensors are of the same types."""
        with torch._C.DisableTorchFunction():
            try:
                return list(map(self.type_of, some)) == list(map(self.type_of, others))
            except Incomparable:
                return False

    def type_of(self, tensor: Tensor) -> object:
        """All that code can read of a fake tensor, but for what it is made of."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or not vars(tensor).keys() <= self.held:
            raise Incomparable("a tensor with values, or with attributes of its own")
        return (
            type(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
            tensor.layout, tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(),
        )


def _modes() -> object:
    """The modes that torch's functions run in. Raises Incomparable in a region that an export cuts out."""
    if not torch.is_grad_enabled() or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise Incomparable("a region")
    if nn.modules.module._has_any_global_hook():
        raise Incomparable("hooks")
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return torch.get_default_dtype(), tuple(map(id, modes))


class _View:
    """Collects what a call can see. ``objects``: modules and tensors, as they are met."""

    def __init__(self, calls: Calls, ignored: object) -> None:
        self.calls, self.ignored = calls, ignored
        self.objects: list[object] = []
        self.tensors: list[Tensor] = []

    def state(self, module: nn.Module) -> object:
        """A module's class and all its attributes. Raises Incomparable where its code is not closed, for hooks, and for
        attributes that could change."""
        if not self.calls.code.holds(type(module)):
            raise Incomparable(type(module).__name__)
        self.objects.append(module)
        listed = is_torch_class(type(module))
        parts: list[object] = [type(module)]
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                parts.append((name, tuple((key, None if t is None else self.tensor(t)) for key, t in value.items())))
            elif name == "_modules":
                parts.append((name, tuple((key, None if m is None else self.state(m)) for key, m in value.items())))
            elif name == "_non_persistent_buffers_set":
                parts.append((name, frozenset(value)))
            elif name in _BLANK and name != "training":
                if value:
                    raise Incomparable(name)
            elif value is not self.ignored or value is None:
                parts.append((name, _constant(value, listed=listed)))
        return tuple(parts)

    def tensor(self, tensor: Tensor) -> object:
        told = self.calls.type_of(tensor)
        self.objects.append(tensor)
        self.tensors.append(tensor)
        return told

    def value(self, value: object) -> object:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if type(value) is tuple:
            return (tuple, *map(self.value, value))
        return _constant(value, listed=False)


def _constant(value: Any, *, listed: bool) -> object:
    """A constant, told apart from others that Python takes to be equal. ``listed``: lists of constants are, too."""
    if type(value) is tuple or (listed and type(value) is list):
        return (type(value), *(_constant(item, listed=listed) for item in value))
    if type(value) is float:
        return float, value.hex()
    if is_constant(value) or is_torch_function(value):
        return type(value), value
    raise Incomparable(type(value).__name__)
