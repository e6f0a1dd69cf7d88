"""Backward passes that a model writes itself: an export holds what forward computes alone, so their gradients would be others.

Hooks are refused, by their lines. An ``autograd.Function`` may go on where its backward pass is the derivative of its forward
pass, as those that are written to save memory or time are: it is tried on a few values once the model is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from planner.ir.errors import ModelError
from planner.trace.lines import is_users, running_line

ADVICE = "the program would not run it: write what autograd derives; x + (f(x) - x).detach() is f(x) with the gradient of x"
HOOK_ADVICE = "the program would not run it: let forward compute what the gradients need"
MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
FEW = 4
"""Elements of a dim that a function is tried on."""
SCALES = (1e-3, 1.0, 1e3)
"""Of the values, and of the gradients that come in, that a function is tried on."""
TOLERANCE = 1e-5


def refuse_hooks(model: nn.Module, where: str) -> None:
    """Raise ModelError where a parameter or a module of the model has a hook for its backward pass."""
    found: list[tuple[str, Any, str]] = [("every module", modules, name) for name in GLOBAL_HOOKS]
    found += [(f"parameter {fqn}", tensor, name) for fqn, tensor in model.named_parameters() for name in TENSOR_HOOKS]
    found += [(f"module {path}" if path else "the model", module, name)
              for path, module in model.named_modules() for name in MODULE_HOOKS]
    for what, owner, name in found:
        for hook in (getattr(owner, name) or {}).values():
            raise ModelError(_line_of(hook) or where, f"{what} has a hook that changes its gradient", HOOK_ADVICE)


def _line_of(hook: Any) -> str | None:
    """``file:line`` of a function that the user wrote."""
    code = getattr(hook, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code and is_users(code.co_filename) else None


@dataclass(frozen=True)
class _Use:
    """A call of a function with a backward pass of its own: fake tensors among its arguments."""

    line: str
    function: type[torch.autograd.Function]
    arguments: Sequence[Any]
    named: Mapping[str, Any]


@dataclass
class Backwards:
    """The functions with backward passes of their own that a model calls, by what tells their calls apart."""

    uses: dict[object, _Use] = field(default_factory=dict)

    def add(self, use: _Use) -> None:
        given = tree_leaves((use.arguments, use.named))
        key = (use.function, *((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else repr(each) for each in given))
        self.uses.setdefault(key, use)

    def refuse_others(self) -> None:
        """Raise ModelError for a backward pass that is not the derivative of its forward pass."""
        for use in self.uses.values():
            if not _derives(use):
                wrong = f"{use.function.__name__}.backward is not the derivative of its forward"
                raise ModelError(use.line, wrong, ADVICE)


@contextlib.contextmanager
def watch_backwards(model: nn.Module, where: str) -> Iterator[Backwards]:
    """Collect the functions with backward passes of their own that are called. Raises ModelError where a hook is registered."""
    found = Backwards()
    apply = vars(torch.autograd.Function)["apply"]
    hooks = {name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}

    def applied(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(function, CheckpointFunction):
            raise ModelError(running_line(), "a reentrant checkpoint hides what it computes from the trace",
                             "give checkpoint use_reentrant=False, or leave it out: a plan says what is recomputed")
        if not function.__module__.startswith("torch."):  # torch's own are derivatives
            found.add(_Use(running_line(), function, args, kwargs))
        return apply.__func__(function, *args, **kwargs)

    def registered(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        raise ModelError(running_line(), "a hook changes the gradient of a tensor", HOOK_ADVICE)

    type.__setattr__(torch.autograd.Function, "apply", classmethod(applied))
    for name in hooks:
        setattr(Tensor, name, registered)
    try:
        yield found
    finally:
        type.__setattr__(torch.autograd.Function, "apply", apply)
        for name, hook in hooks.items():
            setattr(Tensor, name, hook)
    refuse_hooks(model, where)


def _derives(use: _Use) -> bool:
    """Whether autograd derives the same gradients from a function's forward pass, as far as a few values tell. What fails on
    them is taken to be another."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            return all(_alike(use, scale, generator) for scale in SCALES)
        except Exception:  # noqa: BLE001 - the user's code, on arguments that are not its own
            return False


def _alike(use: _Use, scale: float, generator: torch.Generator) -> bool:
    """Whether the gradients are the same at values of a scale, where the derivative is a number."""
    leaves: list[Tensor] = []

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [min(extent, FEW) for extent in value.shape]
        if not value.is_floating_point():
            return torch.randint(0, 2, shape, generator=generator).to(value.dtype)
        made = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        return made.clone()

    arguments, named = tree_map(drawn, (tuple(use.arguments), dict(use.named)))
    if not leaves:
        return True
    own = _floating(use.function.apply(*arguments, **named))
    again, named_again = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, (arguments, named))
    plain = _floating(_forward(use.function, *again, **named_again))
    if len(own) != len(plain):
        return False
    for size in SCALES:
        incoming = [size * torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in own]
        for one, other in zip(_gradients(own, leaves, incoming), _gradients(plain, leaves, incoming), strict=True):
            close = torch.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * size) | other.isnan()
            if other.isnan().all() or not close.all():
                return False
    return True


def _forward(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function's forward pass alone."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*args, **kwargs)
    return function.forward(torch.autograd.function.FunctionCtx(), *args, **kwargs)


def _floating(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point()]


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the leaves, zeros where none comes."""
    reached = [(each, gradient) for each, gradient in zip(outputs, incoming, strict=True) if each.requires_grad]
    if not reached:
        return [torch.zeros_like(leaf) for leaf in leaves]
    values, given = zip(*reached, strict=True)
    made = torch.autograd.grad(values, leaves, given, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, made, strict=True)]
