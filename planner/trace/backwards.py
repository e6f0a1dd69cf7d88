"""Backward passes that a model writes itself: an export holds what forward computes alone, so their gradients would be others.

Hooks are refused, by their lines. An ``autograd.Function`` may go on where its backward pass is the derivative of its forward
pass, as those that are written to save memory or time are: it is tried on a few values once the model is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, compress
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
KEPT, MOST = (0, 1, 2, 3), 1 << 21
"""Numbers of extents that are not shortened, and elements at most where some are not."""
SCALES = (1e-3, 0.03, 0.3, 1.0, 1e3)
"""Of the values that a function is tried on: some take those below one alone, and hardly depend on the least of them."""
NOT_ZERO = 1e-2
"""How far values are from zero, of their scale: derivatives end there, and what is said must not be a matter of how many are
drawn."""
SIZES = (1e-3, 1.0, 1e3)
"""Of the gradients that come in."""
QUIET = 1e-2
"""Of the tolerance and of what comes in: gradients that are less may be made by rounding, and tell nothing."""


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
        """Raise ModelError for a backward pass that is not known to be the derivative of its forward pass."""
        for use in self.uses.values():
            if wrong := _wrong(use, self.batch):
                raise ModelError(use.line, f"{use.function.__name__}.backward {wrong}", ADVICE)


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
        if not any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves((args, kwargs))):
            return result
        return tree_map(_constant, result)

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


def _constant(result: Any) -> Any:
    """What a function returns, cut off where it is marked as not differentiable, which its forward pass does not say."""
    marked = isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad
    return result.detach() if marked else result


@dataclass(frozen=True)
class _Trial:
    """How a function is tried: on floating values of a dtype and scales, for gradients of ``sizes``, on whole numbers 0 and 1
    or (``counted``) 0, 1, 2 ..."""

    dtype: torch.dtype
    tolerance: float
    scales: Sequence[float] = SCALES
    sizes: Sequence[float] = SIZES
    counted: bool = False


TRIALS = (
    _Trial(torch.float64, 1e-5), _Trial(torch.float64, 1e-5, counted=True), _Trial(torch.float32, 1e-2, (1.0,), (1.0,))
)
"""Some functions take other values than the first, or their own dtype alone."""


def _wrong(use: _Use, batch: int) -> str | None:
    """What is wrong with a function's backward pass, as far as a few values tell."""
    failure, wrong = "", ""
    for trial in TRIALS:
        if wrong and not trial.counted:
            break
        found = _found(use, trial, batch)
        if isinstance(found, Exception):
            failure = failure or f"could not be tried on a few values ({type(found).__name__}: {found})".splitlines()[0]
            continue
        told = [each for each in found if each is not None]
        if len(told) == len(found) and all(map(any, zip(*told, strict=True))):
            return None
        # Of places that have to be different, say, it may be the derivative.
        wrong = wrong or ("could not be checked: on the values tried, its gradients are no numbers or next to nothing"
                          if len(told) == len(found) else "is not the derivative of its forward")
    return wrong or failure


def _found(use: _Use, trial: _Trial, batch: int) -> list[list[bool] | None] | Exception:
    """What values of each scale tell, in the first sizes that the function takes; its error where it takes none."""
    given = tree_leaves((use.arguments, use.named))
    failure = Exception()
    for short in _shortenings([_samples(value.shape, batch) for value in given if isinstance(value, Tensor)]):
        try:
            return [_told(use, trial, scale, batch, short) for scale in trial.scales]
        except Exception as error:  # noqa: BLE001 - the user's code, on arguments that are not its own
            failure = error
    return failure


def _shortenings(shapes: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """Extents that stand for longer ones: for all at first, then for all but a few, which the function may have been told as
    whole numbers."""
    extents = sorted({extent for shape in shapes for extent in shape if extent > CAPS[-1]})
    found: list[dict[int, int]] = []
    for kept in chain.from_iterable(combinations(extents, number) for number in sorted({*KEPT, len(extents)})):
        for cap in CAPS:
            short = {extent: cap for extent in extents if extent > cap and extent not in kept}
            largest = max((prod(short.get(extent, extent) for extent in shape) for shape in shapes), default=0)
            if largest <= MANY:
                break
        # Two extents may meet in a product of tensors.
        if short not in found and (not kept or max(largest, prod(kept[-2:])) <= MOST):
            found.append(short)
    return found


def _told(use: _Use, trial: _Trial, scale: float, batch: int, short: Mapping[int, int]) -> list[bool] | None:
    """Of which arguments values of a scale tell that the gradients are those that autograd derives from the forward pass; None
    where they are others. ``short``: extents in the place of others."""
    leaves: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    given = (tuple(use.arguments), dict(use.named))

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _samples((value,), batch)[0] if type(value) is int else value
        shape = [short.get(extent, extent) for extent in _samples(value.shape, batch)]
        if not value.is_floating_point():
            whole = torch.arange(prod(shape)).view(shape) if trial.counted else torch.randint(0, 2, shape, generator=generator)
            return whole.to(value.dtype)
        made = torch.randn(shape, generator=generator, dtype=trial.dtype)
        made = scale * (made + made.sign() * NOT_ZERO)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        return made.clone()

    with torch.random.fork_rng(devices=[]), torch.enable_grad(), default_dtype(trial.dtype):
        arguments, named = tree_map(drawn, given)
        if not leaves:
            return []
        again, named_again = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, (arguments, named))
        own = _floating(use.function.apply(*arguments, **named))
        plain = _floating(_forward(use.function, *again, **named_again))
        if len(own) != len(plain):
            return None
        differentiable = [each.requires_grad for each in own]
        own, plain = (list(compress(each, differentiable)) for each in (own, plain))
        told = [False] * len(leaves)
        for size in trial.sizes:
            incoming = [size * torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in own]
            pairs = zip(_gradients(own, leaves, incoming), _gradients(plain, leaves, incoming), strict=True)
            for place, (one, other) in enumerate(pairs):
                tells = _tells(one, other, size, trial.tolerance)
                if tells is None:
                    return None
                told[place] |= tells
    return told


def _tells(one: Tensor, other: Tensor, size: float, tolerance: float) -> bool | None:
    """Whether a gradient tells that it is the ``other``, of what comes in at a size; None where it is not."""
    known = other[other.isfinite()]
    largest = known.abs().max().item() if len(known) else 0.0
    quiet = largest < QUIET * tolerance * size
    near = tolerance * (size if quiet else min(size, largest))
    if not (torch.isclose(one, other, rtol=tolerance, atol=near) | other.isnan()).all():
        return None
    nothing = len(known) == other.numel() and not one.any() and not other.any()
    return nothing or not quiet


def _samples(extents: Sequence[int], batch: int) -> list[int]:
    """Extents with a few samples in the place of the batch."""
    return [SAMPLES * (extent // batch) if extent and extent % batch == 0 else extent for extent in extents]


def _forward(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function's forward pass alone."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*args, **kwargs)
    context: Any = torch.autograd.function.FunctionCtx()
    context.needs_input_grad = tuple(isinstance(each, Tensor) and each.requires_grad for each in args)
    return function.forward(context, *args, **kwargs)


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
