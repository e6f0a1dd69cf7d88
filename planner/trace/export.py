"""Pass 2: torch.export of the whole training step, at an improbable batch.

The batch is made symbolic by tracing with a large prime number of samples: every size and integer of the graph that it
divides is that multiple of the batch. (torch's own symbolic shapes cost guards and time and turn shape arithmetic into
nodes; everything here stays a literal.) A product of sizes is divisible only if one of them is; no size of the model
may be, which is checked. What Python computes from the batch is refused (batches.py).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import io
import linecache
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._export.utils import _compiling_state_context
from torch.export import ExportedProgram

from planner.ir.errors import ModelError, ShardwrightError
from planner.ir.graph import BatchInput, Role
from planner.ir.types import BatchMultiple, TensorType
from planner.trace.backwards import watch_backwards
from planner.trace.batches import Called, Record
from planner.trace.build import BuiltModel, build
from planner.trace.chance import DrawnError, RefuseDrawnNumbers, refuse_seeds
from planner.trace.changes import refuse_assignments, refuse_changed_constants, traces_of_changes
from planner.trace.dtypes import name_of
from planner.trace.examples import NORMAL, example_inputs, examples, likenesses, shown
from planner.trace.hidden import Hidden, UnlikeError
from planner.trace.lines import first_line, passed_through, users_line
from planner.trace.loops import RefuseSampleLoops
from planner.trace.passes import refuse_batch_numbers, refuse_foreign_draws
from planner.trace.patches import PATCHES
from planner.trace.regions import detach_regions
from planner.trace.repeats import Repeats, draw_out, repeats_as_one
from planner.trace.source import ModelSource
from planner.trace.strays import RefuseStrays
from planner.trace.writes import refuse_lost_gradients

BATCH = 1_000_003
"""Samples of the traced batch: a prime beyond any size of a model."""

IGNORED = -100
"""Label of a token without loss (torch's own default for ``ignore_index``)."""


@dataclass(frozen=True)
class Exported:
    """The exported step and the batch inputs that it takes. ``hidden``: nodes of parameters and buffers beside those that the
    program's signature names, by the model's names. ``changes``: stack traces of what changes tensors in place, by module."""

    where: str
    program: ExportedProgram
    batch_inputs: tuple[BatchInput, ...]
    sequence: int
    hidden: Mapping[str, fx.Node]
    changes: Mapping[str, str]


class TrainingStep(nn.Module):
    """Model and loss as one module: batch tensors in, loss (or its sum and weight) out.

    ``accepted``: batch inputs by the argument of the model's forward that takes them, None for all as a dict.
    """

    def __init__(self, model: nn.Module, accepted: Mapping[str, str | None], loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.accepted = accepted
        self.loss = _told_by_line(loss)
        self.hidden = Hidden()
        self.record = Record()

    def forward(self, batch: dict[str, Tensor]) -> Any:
        given = {argument: batch[name] if name else dict(batch) for argument, name in self.accepted.items()}
        # Both here, where the model's code begins: torch's own around it asks tensors a hundred thousand times.
        with self.hidden.where(hidden=False), RefuseSampleLoops(BATCH), RefuseDrawnNumbers(), self.record.of(self.model), \
                RefuseStrays(self.model), refuse_seeds(), _unvalidated():
            return _checked(self.loss, self.loss(self.model(**given), batch))


def _unvalidated() -> contextlib.AbstractContextManager[object]:
    """Within, distributions do not look at the values that they are given unless they are told to: asserts are left out."""
    return mock.patch.object(torch.distributions.Distribution, "_validate_args", False)


def _told_by_line(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same function under the name of those whose lines torch keeps while it traces. What is a module is none of this
    step's, whose own are the model's."""
    if not inspect.isfunction(loss):
        return functools.partial(loss)
    code = loss.__code__.replace(co_name="forward")
    named = FunctionType(code, loss.__globals__, "forward", loss.__defaults__, loss.__closure__)
    named.__kwdefaults__ = loss.__kwdefaults__
    return functools.update_wrapper(named, loss)


def _checked(loss: Callable[..., Any], returned: Any) -> Any:
    """What loss() has returned, where it is no dict, of which nobody says what to train on."""
    if isinstance(returned, Mapping):
        code = inspect.unwrap(loss).__code__ if inspect.isfunction(inspect.unwrap(loss)) else None
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else "loss()"
        raise ModelError(where, f"loss() returned a dict of {', '.join(map(str, returned))}",
                         "return one scalar to train on, or (sum of the terms, their weight)")
    return returned


class _Way(enum.Enum):
    """How repeated modules are exported, the quickest way first: once, tensors of the others hidden from torch; once; each."""

    HIDDEN = enum.auto()
    ONCE = enum.auto()
    EACH = enum.auto()


def export(source: ModelSource, built: BuiltModel, sequence: int | None, *, repeats: bool = True) -> Exported:
    """Trace the step. Raises ModelError, naming the source line, where torch.export cannot.

    ``repeats``: repeated modules that are provably alike are traced once, with the same result.
    """
    _check_sizes(source, built, sequence)
    return _export(source, built, sequence, _Way.HIDDEN if repeats else _Way.EACH)


def _export(source: ModelSource, built: BuiltModel, sequence: int | None, way: _Way) -> Exported:
    inputs = example_inputs(source, built.dtype, sequence)
    real = examples(source, built.dtype, sequence, inputs)
    largest, like = shown(real), likenesses(real)
    with built.fake:
        batch = _filled(inputs, BATCH)
    given = tuple(
        _batch_input(name, tensor, source.roles.get(name, "other"), largest.get(name, 0), like.get(name, NORMAL))
        for name, tensor in batch.items()
    )
    step = _step(source, built, batch)
    program, repeats, changes = _program(source, built, step, batch, way)
    if isinstance(program, _Way):  # with a model as new: forward may have changed the other
        source = source.anew()
        return _export(source, build(source, built.dtype), sequence, program)
    run = functools.partial(_calls_of, inputs)
    if step.record.draws:
        refuse_foreign_draws(source, built, run)
    refuse_batch_numbers(source, built, run, step.record.calls, BATCH, frozenset(repeats.drawn))
    return Exported(source.where, program, given, sequence or 0, repeats.hidden.nodes, changes)


def _step(source: ModelSource, built: BuiltModel, batch: Mapping[str, Tensor]) -> TrainingStep:
    loss = source.loss or functools.partial(default_loss, remedy=source.remedy)
    return TrainingStep(built.module, _accepted(source, built.module, batch), loss)


def _program(
    source: ModelSource, built: BuiltModel, step: TrainingStep, batch: dict[str, Tensor], way: _Way
) -> tuple[ExportedProgram | _Way, Repeats, dict[str, str]]:
    """The step as torch exports it, or the way in which it has to be exported; what it changes in place, by module."""
    repeats, changes = Repeats(), dict[str, str]()
    with _quiet():
        try:
            with contextlib.ExitStack() as stack:
                if way is not _Way.EACH:
                    repeats = stack.enter_context(repeats_as_one(built.module, "model", hide=way is _Way.HIDDEN))
                step.hidden = repeats.hidden
                stack.enter_context(built.fake)
                stack.enter_context(refuse_assignments(built.module))
                backwards = stack.enter_context(watch_backwards(built.module, source.where, BATCH))
                program = torch.export.export(step, (), {"batch": batch}, strict=False)
            backwards.refuse_others()
            hidden = repeats.hidden
            if hidden.members and (_changes(program) or hidden.read(program, "model")):
                return _Way.ONCE, repeats, changes
            if (repeats.firsts or hidden.members) and not draw_out(program, hidden):
                return _Way.EACH, repeats, changes
            if _changes(program):
                refuse_changed_constants(program, source.where)
                changes = traces_of_changes(program)
                refuse_lost_gradients(program, source.where)
                detach_regions(program)
                program.graph_module.recompile()
                program = program.run_decompositions(PATCHES)
            return program, repeats, changes
        except ShardwrightError:
            raise
        except UnlikeError:
            return _Way.ONCE, repeats, changes
        except Exception as error:  # export runs user code and fails in many ways: each is an untraceable model
            if repeats.firsts or repeats.hidden.members:
                return _Way.EACH, repeats, changes
            raise _untraceable(source, error, step.accepted, batch) from error


def _calls_of(
    inputs: Mapping[str, Tensor], source: ModelSource, built: BuiltModel, samples: int, drawn: frozenset[str]
) -> Sequence[Called]:
    """What the step calls for a number of samples, up to where it fails. ``inputs``: some samples; ``drawn``: modules that do
    not run."""
    with built.fake:
        batch = _filled(inputs, samples)
    step = _step(source, built, batch)
    repeats = repeats_as_one(built.module, "model", hide=False, only=drawn)
    # What the model compiles itself would run its kernels on tensors that hold nothing.
    eagerly = torch.compiler.set_stance("force_eager")
    with _quiet(), repeats, built.fake, _compiling_state_context(), eagerly:
        try:
            step(batch)
        except Exception as error:  # noqa: BLE001 - the user's code; whether it fails may depend on the number
            step.record.fails(error, source.where)
    return step.record.calls


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of a failing export (whole graphs) or a user's forward prints: one error line suffices."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    unheard = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def default_loss(outputs: Any, batch: Mapping[str, Tensor], remedy: str = "") -> tuple[Tensor, Tensor]:
    """Cross-entropy over labels that are not ignored: [batch, seq, vocabulary] or [batch, classes] logits. ``remedy``: what is
    right where the output is something else, if a loss cannot be defined."""
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits", logits)
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3) or not logits.is_floating_point():
        said = f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            said = f"a tensor of shape {tuple(logits.shape)} in {str(logits.dtype).removeprefix('torch.')}"
        raise ModelError("the model's output", f"is {said}",
                         remedy or "return logits [batch, seq, vocabulary], or define loss()")
    if "labels" not in batch:
        raise ModelError("the model's inputs", f"are {', '.join(batch)}; the default loss needs labels",
                         remedy or "name them in example_inputs(batch, seq), or define loss(outputs, batch)")
    labels = batch["labels"]
    if labels.dim() != logits.dim() - 1:
        raise ModelError("the model's output", f"has {logits.dim()} dims, the labels {labels.dim()}", remedy or "define loss()")
    if logits.dim() == 3 and logits.shape[1] == 1 != labels.shape[1]:
        raise ModelError("the model's output", f"has logits of one position, and labels are {labels.shape[1]} a sample",
                         remedy or "forward is given no targets: define example_inputs(batch, seq), which names them as "
                         "forward does, and loss(outputs, batch)")
    if logits.dim() == 3:
        logits = logits.flatten(0, 1)
        labels = labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    weight = (labels != IGNORED).sum()
    return loss, weight


def _check_sizes(source: ModelSource, built: BuiltModel, sequence: int | None) -> None:
    for parameter in built.parameters:
        for extent in parameter.type.shape:
            if isinstance(extent, int) and extent and extent % BATCH == 0:
                raise ModelError(source.where, f"a size of parameter {parameter.fqn} is a multiple of {BATCH:,}",
                                 "choose any other: this number stands for the batch while tracing")
    if sequence is not None and (sequence < 1 or sequence % BATCH == 0):
        raise ModelError("--seq", f"{sequence} is no sequence length", "give a positive number of tokens")


def _filled(given: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Inputs like those, of so many samples."""
    return {name: torch.zeros(samples, *tensor.shape[1:], dtype=tensor.dtype) for name, tensor in given.items()}


def _accepted(source: ModelSource, module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Batch inputs by the argument of forward that takes them, None for the dict of all; the others are the loss's.

    Labels go to the model only where it cannot do without them. A single required argument takes the tokens, whatever
    its name, or the dict where it is annotated as one or named ``batch``; a forward of nothing but ``**inputs`` takes
    all.
    """
    parameters = inspect.signature(module.forward).parameters
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    accepted: dict[str, str | None] = {
        name: name for name in batch if name in parameters and (name != "labels" or parameters[name] in required)
    }
    if not accepted and len(required) == 1:
        accepted = {required[0].name: None if _takes_dict(required[0]) else next(iter(batch))}
    if not accepted and not required and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        accepted = {name: name for name in batch if name != "labels"}
    if not accepted:
        takes = f"forward takes {', '.join(str(p).partition(':')[0] for p in parameters.values()) or 'nothing'}"
        if source.example_inputs is not None:
            raise ModelError(source.where, f"{takes}, example_inputs gives {', '.join(batch)}",
                             "give an input the name of the argument that takes it")
        raise ModelError(source.where, takes,
                         source.remedy or "name an argument input_ids, or define example_inputs(batch, seq)")
    return accepted


def _takes_dict(parameter: inspect.Parameter) -> bool:
    said = parameter.annotation
    if said is parameter.empty:
        return parameter.name == "batch"
    return bool(re.search(r"\b(dict|Dict|Mapping)\b", said if isinstance(said, str) else repr(said)))


def _batch_input(name: str, tensor: Tensor, role: Role, below: int, like: tuple[str | float, ...]) -> BatchInput:
    shape: tuple[int | BatchMultiple, ...] = (BatchMultiple(1), *(int(extent) for extent in tensor.shape[1:]))
    if role == "tokens" and (tensor.dim() != 2 or tensor.is_floating_point()):
        role = "other"  # several sequences, a grid of codes: not a piece of a text
    type_ = TensorType(shape, name_of(tensor.dtype))
    return BatchInput(name, type_, role, shown=below, like=like)


def _calls(program: ExportedProgram) -> Iterator[Any]:
    """What the nodes of a program call."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node.target for node in module.graph.nodes if node.op == "call_function")


def _changes(program: ExportedProgram) -> bool:
    """Whether the program has to be made another by torch."""
    return _mutates(program) or _maps(program)


def _mutates(program: ExportedProgram) -> bool:
    """Whether some operation changes a tensor in place (torch then has to make the graph functional)."""
    return any(isinstance(call, torch._ops.OpOverload) and call._schema.is_mutable for call in _calls(program))


def _maps(program: ExportedProgram) -> bool:
    """Whether ``torch.vmap`` left its marks instead of the operations that it stands for."""
    return any(getattr(call, "__module__", "").startswith("torch._functorch") for call in _calls(program))


def _untraceable(
    source: ModelSource, error: Exception, accepted: Mapping[str, str | None], batch: Mapping[str, Tensor]
) -> ModelError:
    """The user's line and the construct, of whatever torch.export raised."""
    line = users_line(error) or source.where
    said = first_line(error)[:200]
    code = _code_at(line)
    if isinstance(error, DrawnError):
        settings = " ".join(f"--set {field}=0.0" for field in source.layer_drop) or "layerdrop=0.0 of transformers' configs"
        return ModelError(line, f"control flow or a Python number depends on random numbers{code}",
                          "choose by torch.where, for every sample (torch.rand(batch, 1, 1) < 0.9), or switch off what drops "
                          f"layers at random ({settings})")
    if isinstance(error, SyntaxError) and "random_.from" in str(error.text):  # torch writes "from", an argument, as Python
        return ModelError(source.where, "torch cannot trace random_(low, high)", "use torch.randint(low, high, size)")
    if type(error).__name__ == "UncapturedHigherOrderOpError":  # of torch._dynamo, which takes a second to import
        return ModelError(line, f"torch's operations that take functions (cond, scan, while_loop, map) are not supported{code}",
                          "write a loop as Python's, which a trace unrolls, and a choice as torch.where of both results")
    asserted = re.fullmatch(r"Unknown symbol \w+ created by constraints solver", said)
    if asserted:  # Of torch before 2.13 when the model has run, so that no line of it is known.
        code = ": an assert on what .item() gave"
    if asserted or re.search(r"DataDependent|GuardOnData|data-dependent|\.item\(\)", f"{type(error).__name__} {error}"):
        if passed_through(error, "_detect_is_causal_mask"):
            return ModelError(line, f"torch looks at a mask's values to see whether it is causal{code}",
                              "say so: tgt_is_causal=True beside tgt_mask, src_is_causal=True beside src_mask, is_causal=True "
                              "for nn.TransformerEncoder (False of any other mask)")
        return ModelError(line, f"control flow or a Python number depends on tensor values{code}",
                          "the traced graph must be the same for all data")
    advice = "write it in traceable tensor code"
    if "_ctc_loss" in said:
        return ModelError(line, f"torch cannot trace ctc_loss, which looks at the values of its lengths{code}",
                          "sum over the alignments step by step: docs/models.md has the same loss in tensor code")
    if "FlexAttention" in said:
        advice = "use F.scaled_dot_product_attention, with a mask or bias [seq, seq] in place of score_mod and block_mask"
    if accepted.get("batch", "") is None and isinstance(error, TypeError) and "dict" in said:
        advice = ("batch is given the dict of all inputs: annotate it as Tensor, or give it another name than batch, "
                  "to be given the first alone")
    absent = isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in batch
    if absent or (isinstance(error, TypeError) and "required positional argument" in said):
        advice = f"the inputs are {', '.join(batch)}: example_inputs(batch, seq) says which"
    return ModelError(line, f"cannot be traced: {type(error).__name__}: {said}", source.remedy or advice)


def _code_at(line: str) -> str:
    """The source text of a ``file:line``, as ": text"."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f": {text}" if text else ""
