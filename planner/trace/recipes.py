"""Initialisation recipes: what really happens to each storage while a model is constructed, told as a few steps.

A :class:`Recorder` is a dispatch mode under which every large tensor is fake but looks like an ordinary CPU tensor (so
that libraries which skip initialisation on meta do not), while small ones hold real values (so that tables such as
rotary frequencies are known). Each storage has a :class:`History`; a full overwrite begins it anew.
"""

from __future__ import annotations

import base64
import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.ir.errors import ModelError
from planner.ir.graph import InitStep
from planner.trace.dtypes import CONSTANT, name_of

REAL_ELEMENTS = 1 << 18  # an uninitialised tensor up to this size is real while the model is constructed
REAL_TABLE_ELEMENTS = 1 << 24  # so is a computed one up to this (a causal mask of 4096 x 4096)
BY_VALUE_ELEMENTS = 1_000_000  # an initial value that no recipe tells is kept as it is, up to this size,
DRAWN_BY_VALUE_ELEMENTS = 1 << 16  # or up to this where it was drawn at random (one draw, whatever the seed)

Step = tuple[Any, ...]


@dataclass(frozen=True)
class History:
    """Steps since the last full overwrite. ``random``: a draw is among what made it; ``draw``: index of the last draw;
    ``draws``: of all that its values, or the places of them, were computed from. ``numbers``: which of the last draw's
    numbers, in which order, the tensor has that lies in the storage as ``lies`` says."""

    steps: tuple[Step, ...]
    random: bool = False
    draw: int | None = None
    draws: frozenset[int] = frozenset()
    numbers: object = None
    lies: tuple[object, ...] = ()

    def then(self, *steps: Step) -> History:
        return replace(self, steps=(*self.steps, *steps))


@dataclass(frozen=True)
class Draw:
    """One use of the random generator, in the order of construction."""

    op: str
    arguments: tuple[float, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


UNKNOWN = History((("unknown", "a tensor made elsewhere"),))


class Recorder(TorchDispatchMode):
    """Runs construction on fake or small real tensors and keeps the history of every storage."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.histories: dict[int, History] = {}
        self.stale: set[int] = set()
        self.draws: list[Draw] = []
        self._kept: list[Tensor] = []
        self._alive: dict[int, object] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = {_key(tensor) for tensor in tensors}
        result = self._execute(func, args, kwargs, tensors)
        self._record(func, args, kwargs, tensors, result, before)
        return result

    def history(self, tensor: Tensor) -> History:
        return self.histories.get(_key(tensor), UNKNOWN)

    def numbers(self, tensor: Tensor) -> object:
        """Equal for two tensors of one draw whose numbers are the same, each in its own row-major order: copies."""
        history, lies = self.history(tensor), _lies(tensor)
        return history.numbers if lies == history.lies else (history.numbers, history.lies, lies)

    def _execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        mutable = func._schema.is_mutable
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func in _FILLING and len(tensors) == 1 and _fills(func, args, kwargs):
                return args[0]
            with self.fake:
                result = func(*args, **kwargs)
            if mutable and not isinstance(args[0], FakeTensor):
                self._set_stale(args[0])
                return args[0]
            return result
        if not mutable and not _is_view(func) and not _is_small(func, args):
            with self.fake:
                shadow = func(*args, **kwargs)
            limit = REAL_ELEMENTS if _is_empty(func) or _overload_base(func).startswith("rand") else REAL_TABLE_ELEMENTS
            if any(isinstance(leaf, Tensor) and leaf.numel() > limit for leaf in tree_leaves(shadow)):
                return shadow
        try:
            made = func(*args, **kwargs)
            return _unwritten(made) if _is_empty(func) else made
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for" not in str(error):
                raise
            # A half-precision kernel that CPUs lack: the history still tells what would have happened.
            if mutable:
                self._set_stale(args[0])
                return args[0]
            with self.fake:
                return func(*args, **kwargs)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], result: Any,
        before: set[int],
    ) -> None:
        name = _overload_base(func)
        if name == "set_":  # gives a tensor another's storage, in which nothing is written
            return
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            self._record_write(name.removesuffix("_"), args, kwargs, tensors)
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in before:
                made = self._made(func, name, args, kwargs, tensors, leaf)
                self._remember(leaf, made if name in _VALUELESS else self._of(made, tensors))
                self._kept.append(leaf) if isinstance(leaf, FakeTensor) else None
                if any(_key(tensor) in self.stale for tensor in tensors):
                    self._set_stale(leaf)

    def _of(self, history: History, tensors: list[Tensor]) -> History:
        """The history of what was computed from these as well."""
        return replace(history, draws=history.draws.union(*(self.history(tensor).draws for tensor in tensors)))

    def _record_write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        target = args[0]
        old = self.history(target)
        new = self._transformed(name, old, target, args[1:], kwargs)
        whole = _is_whole(target)
        new = self._of(new, [each for each in tensors if each is not target or name not in _OVERWRITES or not whole])
        if whole:
            self._remember(target, new)
        elif new.steps == (("constant", 0.0),):
            self._remember(target, old.then(("zero_part", target.storage_offset(), target.numel())))
        elif target.numel():
            self._remember(target, History(
                (*old.steps, ("unknown", f"{name}_ on a part of it")), old.random or new.random, draws=old.draws | new.draws,
            ))

    def _remember(self, tensor: Tensor, history: History) -> None:
        """What has happened to the tensor's storage, for as long as that lives: another may lie at its address then."""
        key = _key(tensor)
        if key not in self._alive:
            self._alive[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._forget(key))
        self.histories[key] = history

    def _set_stale(self, tensor: Tensor) -> None:
        """The values that a tensor holds are not those that it would have."""
        self._remember(tensor, self.history(tensor))
        self.stale.add(_key(tensor))

    def _forget(self, key: int) -> None:
        del self._alive[key], self.histories[key]
        self.stale.discard(key)

    def _made(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], leaf: Tensor
    ) -> History:
        """History of a new tensor."""
        if name in _FILLED:
            return History((("constant", _FILLED[name]),))
        if name in ("full", "new_full", "full_like"):
            return History((("constant", float(args[-1])),))
        if name in ("scalar_tensor",):
            return History((("constant", float(args[0])),))
        if name in ("randn", "randn_like"):
            return self._drawn("normal", (0.0, 1.0), leaf)
        if name in ("rand", "rand_like"):
            return self._drawn("uniform", (0.0, 1.0), leaf)
        if _is_empty(func):
            return History((("uninitialised",),))
        if args and isinstance(args[0], Tensor) and args[0].numel() == leaf.numel():
            return self._transformed(name, self._copied(args[0], leaf), leaf, args[1:], kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags or any(self.history(t).random for t in tensors)
        return History((("unknown", name),), random)

    def _copied(self, source: Tensor, target: Tensor) -> History:
        """History of a storage after the target, all of it, has got the source's numbers."""
        return replace(self.history(source), numbers=self.numbers(source), lies=_lies(target))

    def _transformed(
        self, name: str, old: History, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> History:
        """History after ``name`` was applied to a whole tensor (in place or into a new one)."""
        if name in ("clone", "_to_copy", "lift_fresh", "lift_fresh_copy", "contiguous", "detach"):
            return old
        if name in ("zero", "fill"):
            value = 0.0 if name == "zero" else _number(args[0])
            return History((("constant", value),)) if value is not None else History((("unknown", "fill_"),))
        if name in ("normal", "uniform"):
            words = ("mean", "std") if name == "normal" else ("from", "to")
            given = dict(zip(words, args, strict=False)) | {key: kwargs[key] for key in words if key in kwargs}
            low, high = (float(given.get(word, default)) for word, default in zip(words, (0.0, 1.0), strict=True))
            return self._drawn(name, (low, high), target)
        if name == "copy":
            source = args[0]
            if source.numel() == target.numel():
                return self._copied(source, target)
            only = self.history(source)
            return only if only.steps[-1][0] == "constant" else History((("unknown", "copy_"),), only.random)
        if name in ("erfinv", "neg"):
            return old.then(("erfinv",) if name == "erfinv" else ("scale", -1.0))
        if name == "clamp":
            bounds = (*args, None, None)[:2]
            low, high = kwargs.get("min", bounds[0]), kwargs.get("max", bounds[1])
            return old.then(("clamp", low, high))
        operand = _number(args[0]) if args else None
        if operand is not None and kwargs.get("alpha", 1) == 1:
            step = {"mul": ("scale", operand), "add": ("shift", operand), "sub": ("shift", -operand)}.get(name)
            if name == "div" and operand != 0:
                step = ("divide", operand)
            if step is not None:
                return old.then(step)
        random = old.random or any(isinstance(a, Tensor) and self.history(a).random for a in args)
        return History((*old.steps, ("unknown", name)), random or name in _DRAWS)

    def trunc_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: object = None
    ) -> Tensor:
        """Stands for torch's own while a model is built: that one rejects samples, which needs their values."""
        del generator
        if _is_whole(tensor):
            self._remember(tensor, self._drawn("trunc_normal", (mean, std, a, b), tensor))
        else:
            self._remember(tensor, self.history(tensor).then(("unknown", "trunc_normal_ on a part of it")))
        self._set_stale(tensor)
        return tensor

    def _drawn(self, op: str, arguments: tuple[float, ...], leaf: Tensor) -> History:
        draw = len(self.draws)
        self.draws.append(Draw(op, arguments, tuple(leaf.shape), leaf.dtype))
        return History(((op, *arguments),), True, draw, frozenset({draw}), draw, _lies(leaf))


_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
_VALUELESS = CONSTANT | {"randn_like", "rand_like"}
"""Operations that take a shape from a tensor, and no values."""
_OVERWRITES = {"zero", "fill", "normal", "uniform", "copy"}
_DRAWS = {"bernoulli", "random", "exponential", "cauchy", "geometric", "log_normal", "multinomial"}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size()


def _lies(tensor: Tensor) -> tuple[object, ...]:
    """Where a tensor's numbers are in its storage, in row-major order: the same for contiguous ones of whatever shape."""
    if tensor.is_contiguous():
        return tensor.numel(), tensor.storage_offset()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _overload_base(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


_FILLING = frozenset({torch.ops.aten.zero_.default, torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default})


def _fills(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a fill of a fake tensor leaves all that is known of it as it is, and raises no error."""
    if func is torch.ops.aten.zero_.default:
        return True
    numbers = args[1:]
    if len(numbers) != 2 or kwargs.keys() - {"generator"} or not args[0].is_floating_point():
        return False
    return bool(numbers[0] <= numbers[1] if func is torch.ops.aten.uniform_.default else numbers[1] >= 0)


def _is_small(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an uninitialised tensor is known to be small before it is made."""
    return func is torch.ops.aten.empty.memory_format and math.prod(args[0]) <= REAL_ELEMENTS


def _is_empty(func: Any) -> bool:
    return _overload_base(func).startswith(("empty", "new_empty"))


def _unwritten(made: Tensor) -> Tensor:
    """A new tensor without values, filled with what nothing writes: a part that stays as it is can be told."""
    with torch.utils._python_dispatch._disable_current_modes():
        return made.fill_(math.nan) if made.is_floating_point() else made


def _is_view(func: Any) -> bool:
    return bool(func.is_view) or _overload_base(func) in ("detach", "alias")


def _number(value: object) -> float | None:
    """A Python number, or what a small real 0-dim tensor holds."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.numel() == 1:
        with torch.utils._python_dispatch._disable_current_modes():
            return float(value)
    return None


def recipe(
    fqn: str, where: str, tensor: Tensor, history: History, stale: bool, traced: str
) -> tuple[InitStep, ...]:
    """The steps that make a parameter's initial value. ``traced``: its dtype in the graph.

    Raises ModelError, naming the parameter and the operation, where no such steps are known.
    """
    steps = _trunc_normal(history.steps)
    told = [_told(step, tensor) for step in steps]
    if all(step is not None for step in told) and told:
        return tuple(step for step in told if step is not None)
    known = not (stale or isinstance(tensor, FakeTensor) or (("uninitialised",) in steps and tensor.isnan().any()))
    if known and tensor.numel() <= (DRAWN_BY_VALUE_ELEMENTS if history.random else BY_VALUE_ELEMENTS):
        dtype = name_of(tensor.dtype)
        return (InitStep("value", (encode(tensor.detach()), *(() if dtype == traced else (dtype,)))),)
    if steps[-1] == ("uninitialised",):
        raise ModelError(where, f"parameter {fqn} is never initialised", "give it values in its module's constructor")
    untold = [step for step, said in zip(steps, told, strict=True) if said is None]
    culprit = next((step for step in untold if step[0] == "unknown"), untold[0])
    wrong = f"the initialisation of parameter {fqn} uses {culprit[-1] if culprit[0] == 'unknown' else culprit[0]}"
    right = "normal, uniform, trunc_normal, constants, scaling and shifting can be replayed"
    if ("uninitialised",) in steps and not history.random and REAL_ELEMENTS < tensor.numel() <= BY_VALUE_ELEMENTS:
        right = "begin with torch.zeros where torch.empty is: what fills that part by part is kept by value"
    raise ModelError(where, wrong, right)


def _told(step: Step, tensor: Tensor) -> InitStep | None:
    op, *arguments = step
    if op == "divide":
        return InitStep("scale", (1.0 / arguments[0],))
    if op in ("normal", "uniform", "trunc_normal", "constant", "scale", "shift"):
        return InitStep(op, tuple(arguments))
    if op == "zero_part" and tensor.dim() == 2:
        offset, count = arguments
        if count == tensor.shape[1] and offset % count == 0:
            return InitStep("zero_row", (offset // count,))
    return None


def _trunc_normal(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """torch's ``trunc_normal_`` is uniform, erfinv, scale by std sqrt 2, shift by the mean, clamp."""
    kinds = tuple(step[0] for step in steps[:5])
    if kinds != ("uniform", "erfinv", "scale", "shift", "clamp"):
        return steps
    std, mean, (low, high) = steps[2][1] / 2.0**0.5, steps[3][1], steps[4][1:]
    return (("trunc_normal", mean, std, float(low), float(high)), *steps[5:])


def encode(tensor: Tensor) -> str:
    """A tensor's little-endian bytes, row-major, in base64."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(flat.numpy().tobytes()).decode("ascii")


def replay(steps: tuple[InitStep, ...], tensor: Tensor) -> Tensor:
    """Fill a tensor by a recipe, in place, with torch's global generator, whatever parameter's draws it says."""
    fillers: dict[str, Callable[..., Any]] = {
        "normal": tensor.normal_, "uniform": tensor.uniform_, "constant": tensor.fill_,
        "scale": tensor.mul_, "shift": tensor.add_, "zero_row": lambda index: tensor[index].zero_(),
        "trunc_normal": lambda *arguments: torch.nn.init.trunc_normal_(tensor, *arguments),
        "value": lambda text, dtype="": tensor.copy_(
            decode(text, getattr(torch, dtype) if dtype else tensor.dtype).reshape(tensor.shape)
        ),
    }
    with torch.no_grad():
        for step in steps:
            if step.op == "draws_of":
                continue
            fillers[step.op](*step.arguments)
    return tensor


def decode(text: str, dtype: torch.dtype) -> Tensor:
    """The flat tensor that :func:`encode` wrote."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Run construction under the recorder."""
    original = torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        kept = not _is_whole(tensor) and not isinstance(tensor, FakeTensor)  # a part with values: no recipe, but its numbers
        return (original if kept else recorder.trunc_normal)(tensor, *arguments, **options)

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        with recorder:
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Factory functions make ``dtype`` within."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
