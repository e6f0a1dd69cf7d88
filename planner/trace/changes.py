"""State that forward changes: nothing that the plan could repeat in parts of a batch, so it is refused, by its line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from planner.ir.errors import ModelError
from planner.trace.lines import is_users, source_of

ADVICE = "statistics over a batch differ between micro-batches and plans; use a norm without running averages"


@contextlib.contextmanager
def refuse_assignments(model: nn.Module) -> Iterator[None]:
    """Raise ModelError where the model's own code gives a buffer another tensor (``self.mean = ...``): an export keeps the old
    one and says nothing."""
    names = {(id(module), name): f"{path}.{name}".lstrip(".") for path, module in model.named_modules()
             for name in module._buffers}
    assign = nn.Module.__setattr__

    def watched(module: nn.Module, name: str, value: Tensor | nn.Module) -> None:
        caller = sys._getframe(1)
        buffer = names.get((id(module), name))
        if buffer is not None and isinstance(value, Tensor) and is_users(caller.f_code.co_filename):
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            raise ModelError(line, f"forward replaces buffer {buffer}", ADVICE)
        assign(module, name, value)

    type.__setattr__(nn.Module, "__setattr__", watched)
    try:
        yield
    finally:
        type.__setattr__(nn.Module, "__setattr__", assign)


def refuse_mutation(program: ExportedProgram, where: str) -> None:
    """Raise ModelError, naming the line, where the program changes a buffer or its input in place."""
    for spec in program.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            target = (spec.target or "").removeprefix("model.")
            what = f"buffer {target}" if spec.kind is OutputKind.BUFFER_MUTATION else "its input"
            raise ModelError(_line(program, spec.arg.name) or where, f"forward changes {what} in place", ADVICE)


def _line(program: ExportedProgram, name: str) -> str | None:
    """``file:line`` of the user's code that made a value, or one that it was made of."""
    nodes = {node.name: node for node in program.graph.nodes}
    pending = [nodes[name]]
    while pending:
        node = pending.pop()
        source = source_of(node.meta.get("stack_trace"))
        if source is not None:
            return f"{source.file}:{source.line}"
        pending.extend(node.all_input_nodes)
    return None
