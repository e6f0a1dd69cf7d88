"""Backward passes that a model writes itself: an export holds what forward computes alone, so their gradients would be others.

Hooks are refused, by their lines. An ``autograd.Function`` may go on where its backward pass is the derivative of its forward
pass, as those that are written to save memory or time are: it is tried on a few values once the model is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from planner.ir.errors import ModelError
from planner.trace.lines import is_users, running_line
from planner.trace.recipes import default_dtype

ADVICE = "the program would not run it: write what autograd derives; x + (f(x) - x).detach() is f(x) with the gradient of x"
HOOK_ADVICE = "the program would not run it: let forward compute what the gradients need"
MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SAMPLES, MANY = 2, 1 << 18
"""Samples that a function is tried on, and elements of a tensor at most, as far as possible."""
CAPS = (1 << 18, 4096, 512, 64, 16, 4)
"""Extents at most: the first by which no tensor has too many elements."""
SCALES = (1e-3, 1.0, 1e3)
"""Of the values, and of the gradients that come in, that a function is tried on."""


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
    """The functions with backward passes of their own that a model calls on ``batch`` samples, by what tells their calls
    apart."""

    batch: int
    uses: dict[object, _Use] = field(default_factory=dict)

    def add(self, use: _Use) -> None:
        given = tree_leaves((use.arguments, use.named))
        key = (use.function, *((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else repr(each) for each in given))
        self.uses.setdefault(key, use)

    def refuse_others(self) -> None:
        """Raise ModelError for a backward pass that is not the derivative of its forward pass."""
        for use in self.uses.values():
            if not _derives(use, self.batch):
                wrong = f"{use.function.__name__}.backward is not the derivative of its forward"
                raise ModelError(use.line, wrong, ADVICE)


@contextlib.contextmanager
def watch_backwards(model: nn.Module, where: str, batch: int) -> Iterator[Backwards]:
    """Collect the functions with backward passes of their own that are called. Raises ModelError where a hook is registered."""
    found = Backwards(batch)
    hooks = {name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}

    def applied(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(function, CheckpointFunction):
            raise ModelError(running_line(), "a reentrant checkpoint hides what it computes from the trace",
                             "give checkpoint use_reentrant=False, or leave it out: a plan says what is recomputed")
        if not function.__module__.startswith("torch."):  # torch's own are derivatives
            found.add(_Use(running_line(), function, args, kwargs))
        before = torch.is_grad_enabled()
        result = super(_SingleLevelFunction, function).apply(*args, **kwargs)  # type: ignore[misc]
        torch._C._set_grad_enabled(before)  # As autograd has set it, which a trace does not see.
        return result

    def registered(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        raise ModelError(running_line(), "a hook changes the gradient of a tensor", HOOK_ADVICE)

    # What Function.apply calls: the model may have taken that by another name before.
    type.__setattr__(_SingleLevelFunction, "apply", classmethod(applied))
    for name in hooks:
        setattr(Tensor, name, registered)
    try:
        yield found
    finally:
        type.__delattr__(_SingleLevelFunction, "apply")
        for name, hook in hooks.items():
            setattr(Tensor, name, hook)
    refuse_hooks(model, where)


@dataclass(frozen=True)
class _Trial:
    """How a function is tried: on floating values of a dtype and size, on whole numbers 0 and 1 or (``counted``) 0, 1, 2 ..."""

    dtype: torch.dtype
    scales: Sequence[float]
    tolerance: float
    counted: bool = False


TRIALS = (
    _Trial(torch.float64, SCALES, 1e-5), _Trial(torch.float64, SCALES, 1e-5, counted=True), _Trial(torch.float32, (1.0,), 1e-2)
)
"""Some functions take other values than the first, or their own dtype alone."""


def _derives(use: _Use, batch: int) -> bool:
    """Whether autograd derives the same gradients from a function's forward pass, as far as a few values tell. Raises
    ModelError where it runs on none of them."""
    failure, others = None, False
    for trial in TRIALS:
        if others and not trial.counted:
            return False
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), default_dtype(trial.dtype):
            try:
                found = [_alike(use, trial, scale, generator, batch) for scale in trial.scales]
            except Exception as error:  # noqa: BLE001 - the user's code, on arguments that are not its own
                failure = failure or error
                continue
        if False not in found and True in found:
            return True
        others = True  # Of places that have to be different, say, it may be the derivative.
    if others:
        return False
    wrong = f"{use.function.__name__}.backward could not be tried on a few values ({type(failure).__name__}: {failure})"
    raise ModelError(use.line, wrong.splitlines()[0], ADVICE)


def _alike(use: _Use, trial: _Trial, scale: float, generator: torch.Generator, batch: int) -> bool | None:
    """Whether the gradients are the same at values of a scale; None where none of the derivatives is a number there."""
    leaves: list[Tensor] = []
    given = (tuple(use.arguments), dict(use.named))
    shapes = [_samples(value.shape, batch) for value in tree_leaves(given) if isinstance(value, Tensor)]
    cap = next(cap for cap in CAPS if cap == CAPS[-1] or all(prod(min(e, cap) for e in shape) <= MANY for shape in shapes))

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _samples((value,), batch)[0] if type(value) is int else value
        shape = [min(extent, cap) for extent in _samples(value.shape, batch)]
        if not value.is_floating_point():
            whole = torch.arange(prod(shape)).view(shape) if trial.counted else torch.randint(0, 2, shape, generator=generator)
            return whole.to(value.dtype)
        made = scale * torch.randn(shape, generator=generator, dtype=trial.dtype)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        return made.clone()

    arguments, named = tree_map(drawn, given)
    if not leaves:
        return True
    again, named_again = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, (arguments, named))
    own = _floating(use.function.apply(*arguments, **named))
    plain = _floating(_forward(use.function, *again, **named_again))
    if len(own) != len(plain):
        return False
    told = False
    for size in trial.scales:
        incoming = [size * torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in own]
        for one, other in zip(_gradients(own, leaves, incoming), _gradients(plain, leaves, incoming), strict=True):
            close = torch.isclose(one, other, rtol=trial.tolerance, atol=trial.tolerance * size) | other.isnan()
            if not close.all():
                return False
            told |= not other.isnan().all()
    return told or None


def _samples(extents: Sequence[int], batch: int) -> list[int]:
    """Extents with a few samples in the place of the batch."""
    return [SAMPLES * (extent // batch) if extent and extent % batch == 0 else extent for extent in extents]


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
