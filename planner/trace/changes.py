"""State that forward changes: nothing that the plan could repeat in parts of a batch, so it is refused, by its line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from planner.ir.errors import ModelError
from planner.trace.lines import is_users, source_of

KINDS = {"BUFFER_MUTATION": "buffer {}", "PARAMETER_MUTATION": "parameter {}", "USER_INPUT_MUTATION": "its input"}
ADVICE = "statistics over a batch differ between micro-batches and plans; use a norm without running averages"
REPLACED = ("keep what a pass computes in a local variable; what one leaves to the next, such as statistics over a batch, "
            "differs between micro-batches and plans")
NORMED = ("each micro-batch would change the rows that it has: leave max_norm out, or scale what is looked up, "
          "x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)")
UNCHANGED = "a step's micro-batches would see other values: compute from it without changing it"
POWERED = ("its power iteration goes on in every forward pass, and how many a step has the plan says: remove it, or use "
           "torch.nn.utils.parametrizations.weight_norm")


@contextlib.contextmanager
def refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Raise ModelError where the model's own code gives a buffer another tensor (``self.mean = ...``): an export keeps the old
    one and says nothing. The buffer itself, which ``self.mean.to(x.device)`` is, changes nothing."""
    names = {(id(module), name): f"{path}.{name}".lstrip(".") for path, module in model.named_modules()
             for name in module._buffers}
    assign = nn.Module.__setattr__

    def watched(module: nn.Module, name: str, value: Tensor | nn.Module) -> None:
        caller = sys._getframe(1)
        buffer = names.get((id(module), name))
        another = isinstance(value, Tensor) and value is not module._buffers.get(name)
        if buffer is not None and another and is_users(caller.f_code.co_filename):
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            raise ModelError(line, f"forward replaces buffer {buffer}", REPLACED)
        assign(module, name, value)

    type.__setattr__(nn.Module, "__setattr__", watched)
    try:
        yield
    finally:
        type.__setattr__(nn.Module, "__setattr__", assign)


def traces_of_changes(program: ExportedProgram) -> dict[str, str]:
    """Stack traces of the operations that change a tensor in place, the first of each module by its path. A graph that torch
    has made functional has lost them."""
    traces: dict[str, str] = {}
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                traces.setdefault(_module(node), node.meta.get("stack_trace") or "")
    return traces


def refuse_changed_constants(program: ExportedProgram, where: str) -> None:
    """Raise ModelError, naming the line, where the program changes a constant in place: what ``.data`` made of a parameter or
    an activation, or a tensor that is no buffer. torch works such a change out while it makes a graph functional, on a tensor
    without memory."""
    constants = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR}
    for module in program.graph_module.modules():  # the graph itself, then its regions, whose inputs have the graph's names
        shared: set[fx.Node] = set()
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "placeholder" and node.name in constants:
                shared.add(node)
            elif isinstance(node.target, torch._ops.OpOverload) and node.args and node.args[0] in shared:
                if node.target._schema.is_mutable:
                    raise ModelError(line_of(node) or where, "forward changes the data of a tensor in place", UNCHANGED)
                if node.target._schema.arguments[0].alias_info is not None:
                    shared.add(node)


def refuse_mutation(program: ExportedProgram, where: str, traces: Mapping[str, str]) -> None:
    """Raise ModelError, naming the line, where the program changes a parameter, a buffer or its input in place."""
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        if spec.kind.name not in KINDS:
            continue
        node = nodes[spec.arg.name]
        target = (spec.target or "").removeprefix("model.")
        trace = traces.get(_module(node), "")
        what, right = KINDS[spec.kind.name].format(target), ADVICE
        if "embedding_renorm" in str(node.target):
            what, right = f"{what} (max_norm of an embedding)", NORMED
        elif "SpectralNorm" in _kind(node) or f"model.{target[:-2]}_orig" in program.graph_signature.parameters:
            what, right = f"{what} (spectral_norm)", POWERED
        elif spec.kind.name == "PARAMETER_MUTATION":
            right = UNCHANGED
        raise ModelError(line_of(node) or _place(trace) or where, f"forward changes {what} in place", right)


def _module(node: fx.Node) -> str:
    """The path of the module that an operation is in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _kind(node: fx.Node) -> str:
    """The class of the module that an operation is in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][1]) if stack else ""


def _place(trace: str | None) -> str | None:
    """``file:line`` of the user's code in a stack trace."""
    source = source_of(trace)
    return f"{source.file}:{source.line}" if source else None


def line_of(node: fx.Node) -> str | None:
    """``file:line`` of the user's code that made a value, or one that it was made of."""
    pending = [node]
    while pending:
        node = pending.pop()
        if (found := _place(node.meta.get("stack_trace"))) is not None:
            return found
        pending.extend(node.all_input_nodes)
    return None
