"""Parameters that a step trains on and the model does not have: a program would hold them constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from planner.ir.errors import ModelError
from planner.trace.lines import running_line

_WITHOUT_GRADIENT = frozenset({"__get__", "detach", "detach_"})
"""Functions through which no gradient comes to a parameter: those that ask what it is among them."""


class RefuseStrays(TorchFunctionMode):
    """Raises ModelError where code computes, with gradients, on a parameter that no module of ``model`` has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {id(parameter): parameter for parameter in model.parameters()}  # kept, so that no other takes an identity

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if torch.is_grad_enabled() and getattr(function, "__name__", "") not in _WITHOUT_GRADIENT:
            for each in tree_leaves((args, given)):
                if isinstance(each, nn.Parameter) and each.requires_grad and id(each) not in self._own:
                    raise ModelError(
                        running_line(), f"a parameter of shape {tuple(each.shape)} is used that is none of the model's",
                        "no optimizer would train it: register it in a module of the model (nn.ModuleList, not a list; a "
                        "loss's own: let forward return it), or switch its gradient off (requires_grad_(False))")
        return function(*args, **given)
