"""Pass 1: construct the model without its weights' memory, keeping buffers' values and every parameter's recipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from planner.ir.errors import ModelError
from planner.ir.graph import InitStep, Parameter
from planner.ir.plan import DTYPES
from planner.ir.types import TensorType
from planner.trace.backwards import refuse_hooks
from planner.trace.dtypes import name_of
from planner.trace.generators import seeded
from planner.trace.memory import refuse_shared_memory
from planner.trace.recipes import Draw, Recorder, default_dtype, recipe, recording
from planner.trace.source import ModelSource

PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BuiltModel:
    """A model whose tensors are all fake, with what is known of their values.

    ``canonical``: the first name of every parameter and buffer under any of its names. ``buffers``: all names of buffers.
    ``values``: buffers that have values. ``persistent``: state keys.
    ``draws``: uses of the random generator in order; ``drawn``: the one that each parameter's recipe begins with.
    ``frozen``: parameters whose random start no recipe tells, so that one draw of it is kept by value. ``cast``: parameters
    that the model has in another dtype, by it. ``copied``: the parameter from whose draw a buffer, or a tensor that is an
    attribute of a module, was computed, by the name of that.
    """

    module: nn.Module
    dtype: str
    fake: FakeTensorMode
    parameters: tuple[Parameter, ...]
    canonical: Mapping[str, str]
    buffers: tuple[str, ...]
    values: Mapping[str, Tensor]
    persistent: frozenset[str]
    draws: tuple[Draw, ...]
    drawn: Mapping[str, int]
    frozen: tuple[str, ...] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)


def build(source: ModelSource, dtype: str) -> BuiltModel:
    """Construct the model in ``dtype``. A trillion parameters take no memory. The global generators are left as they were.

    Parameters are of ``dtype`` whatever the model makes them, as in the program, which computes with all of them in one.
    Raises ModelError where the model says that it wants another.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(trace_asserts=True), static_shapes=True)
    recorder = Recorder(fake)
    said = contextlib.redirect_stdout(sys.stderr)  # what a constructor prints is no output of ours
    with seeded(), default_dtype(getattr(torch, dtype)), recording(recorder), said:
        module = source.build()
    refuse_hooks(module, source.where)
    refuse_shared_memory(module, source.where, recorder)
    cast = _cast(module, source.where, getattr(torch, dtype))
    canonical = _canonical(module)
    aliases: dict[str, list[str]] = {}
    for name, first in canonical.items():
        aliases.setdefault(first, []).extend([name] if name != first else [])
    parameters, drawn, frozen = [], {}, []
    firsts: dict[object, str] = {}  # parameters by the numbers of a draw that they are the first to have
    for fqn, trained in module.named_parameters():
        if is_lazy(trained):
            raise ModelError(source.where, f"{fqn} has no shape before the first forward pass", "give the module its sizes")
        if trained.numel() == 0:  # nothing to train, and FSDP2 cannot reduce it
            trained.requires_grad_(False)
        parameters.append(_parameter(source.where, fqn, trained, recorder, tuple(aliases[fqn]), dtype))
        history = recorder.history(trained)
        by_value = parameters[-1].init[0].op == "value"
        if history.draw is not None:
            drawn[fqn] = history.draw
            first = fqn if by_value else firsts.setdefault(recorder.numbers(trained), fqn)
            if first != fqn:
                parameters[-1] = replace(parameters[-1], init=(InitStep("draws_of", (first,)), *parameters[-1].init))
        if history.random and by_value:
            frozen.append(fqn)
    values, persistent = {}, frozenset(module.state_dict(keep_vars=True))
    for fqn, tensor in module.named_buffers():
        if not isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata not in recorder.stale:
            values[fqn] = tensor
    copied = _copied(module, recorder, {drawn[fqn]: fqn for fqn in drawn if fqn not in frozen})
    _replace_by_fakes(module, fake, getattr(torch, dtype))
    draws = tuple(recorder.draws)
    buffers = tuple(fqn for fqn, _ in module.named_buffers(remove_duplicate=False))
    return BuiltModel(
        module, dtype, fake, tuple(parameters), canonical, buffers, values, persistent, draws, drawn, tuple(frozen),
        cast, copied,
    )


def type_of(tensor: Tensor) -> TensorType:
    """Shape and dtype, without a batch."""
    return TensorType(tuple(int(extent) for extent in tensor.shape), name_of(tensor.dtype))


def _canonical(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {fqn: first.setdefault(id(tensor), fqn) for fqn, tensor in names}


def _copied(module: nn.Module, recorder: Recorder, replayed: Mapping[int, str]) -> dict[str, str]:
    """The buffers and tensors among the attributes of modules that were computed from a draw which a program makes another.
    ``replayed``: parameters by the draw that their recipes begin with."""
    attributes = (
        (f"{path}.{name}".lstrip("."), tensor) for path, owner in module.named_modules()
        for name, tensor in vars(owner).items() if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
    )
    copied: dict[str, str] = {}
    for name, tensor in (*module.named_buffers(), *attributes):
        draws = recorder.history(tensor).draws & replayed.keys()
        copied |= {name: replayed[min(draws)]} if draws else {}
    return copied


def _cast(module: nn.Module, where: str, dtype: torch.dtype) -> dict[str, str]:
    """The parameters that are of another dtype. float32 ones in a half precision are what mixed precision is; whoever has the
    rest in half means to train it so, and in float64 all of it. Raises ModelError for these, naming a parameter."""
    others = {fqn: p.dtype for fqn, p in module.named_parameters() if p.is_floating_point() and p.dtype != dtype}
    trained = {fqn: p.dtype for fqn, p in module.named_parameters() if p.is_floating_point() and p.requires_grad}
    whole = set(trained.values()) == {torch.float64}
    for fqn, has in others.items():
        if fqn in trained and (has not in (torch.float32, torch.float64) or whole):
            asked, own = (PRECISIONS.get(name_of(kind)) for kind in (dtype, has))
            wrong = f"parameter {fqn} is {name_of(has)}, and the job computes in {asked}"
            right = "leave its dtype to --precision (no .to(dtype), .half() or .double() in the constructor)"
            raise ModelError(where, wrong, f"--precision {own}, or {right}" if own else right)
    return {fqn: name_of(has) for fqn, has in others.items()}


def _parameter(
    where: str, fqn: str, tensor: nn.Parameter, recorder: Recorder, aliases: tuple[str, ...], dtype: str
) -> Parameter:
    if nn.parameter.is_lazy(tensor):
        raise ModelError(where, f"parameter {fqn} is lazy: it has no shape yet", "give its module's sizes")
    if not tensor.is_floating_point():
        right = "parameters must be floating point"
        if tensor.is_complex():
            right = "keep pairs of real numbers, [..., 2], and compute with torch.view_as_complex of it"
        raise ModelError(where, f"parameter {fqn} is {tensor.dtype}", right)
    stale = tensor.untyped_storage()._cdata in recorder.stale
    return Parameter(
        fqn=fqn,
        type=replace(type_of(tensor), dtype=dtype),
        init=recipe(fqn, where, tensor, recorder.history(tensor), stale, dtype),
        aliases=aliases,
        trainable=tensor.requires_grad,
        decay=tensor.dim() > 1,
    )


def _replace_by_fakes(module: nn.Module, fake: FakeTensorMode, dtype: torch.dtype) -> None:
    """Swap the real tensors among parameters and buffers for fake ones, and parameters for those of ``dtype``, ties kept."""
    fakes: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # so that no other tensor takes its identity
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = fake.from_tensor(tensor, static_shapes=True)
                    kept.append(tensor)
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.dtype == dtype:
                continue
            if id(parameter) not in fakes:
                fakes[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                kept.append(parameter)
            setattr(owner, name, fakes[id(parameter)])  # A recurrent module keeps them in a list too.
