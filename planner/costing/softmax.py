"""Softmax along a dim that is split over the tensor axis, as the runtime computes it (runtime/vocabulary.py)."""

from __future__ import annotations

from planner.costing.local import Step
from planner.costing.tape import Tape
from planner.ir.types import DTYPE_BYTES

SOFTMAXES = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax"})


def split_softmax(tape: Tape, step: Step) -> None:
    """``Softmax`` and ``LogSoftmax``: half precisions are computed in float32; each pass sums one number a row over ranks."""
    operand, result = step.operands[0], step.outputs[0]
    layout = tape.local.layouts[operand]
    assert step.node is not None
    logarithm, dim = "log" in step.node.base, step.node.argument("dim")
    assert isinstance(dim, int)
    item = DTYPE_BYTES[tape.local.types[operand].dtype]
    half, size = item < 4, layout.elements * item
    wide = layout.elements * max(4, item)
    row = wide // layout.sizes[dim]
    if half:
        # [x, x - max, their exponentials], then the rows' sums; [result, gradient, two products] or [gradient, two products].
        forward, backward = 3 * wide + row, (3 if logarithm else 4) * wide + row
    else:
        # softmax: [x - max, exponentials, quotients]; its logarithm: [x - max, result], the rows' sums and their logarithms.
        forward, backward = (2 * wide + 2 * row if logarithm else 3 * wide + row), 2 * wide + row
    need = tape.gradient(operand, size)
    tape.add(
        [(operand, need)], tape.outputs_of(step), [result] if need else [], forward=forward - size, backward=backward - size
    )
