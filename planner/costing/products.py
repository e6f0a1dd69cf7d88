"""Products of tensors of different numbers of dims, as torch folds them (aten/src/ATen/native/LinearAlgebra.cpp,
``_matmul_impl`` and ``should_fold``, torch 2.13)."""

from __future__ import annotations

from math import prod

from planner.costing.local import Step
from planner.costing.tape import TURNED, Tape, needs_gradient
from planner.ops.layout import broadcast_sizes
from planner.ops.saved import folded_second, folds


def is_turned(tape: Tape, step: Step) -> bool:
    """Whether a matrix that is learned is multiplied from the left: the second operand is turned and folded, so is the result
    turned back."""
    first, second = (tape.local.layouts[value] for value in step.operands[:2])
    return len(first.sizes) <= 2 < len(second.sizes) and step.differentiable and needs_gradient(tape.local, step.operands[0])


def turned_product(tape: Tape, step: Step) -> None:
    """The second operand turned and made a matrix (a copy, where it is several), their product, and its copy turned back."""
    matrix, other = step.operands
    layouts = tape.local.layouts
    size, whole = tape.bytes_of(other), tape.bytes_of(step.outputs[0])
    lies, single = folded_second(layouts[other]) is not None, len(layouts[matrix].sizes) == 1
    folded, product = tape.name("folded"), step.outputs[0] if single else tape.name("product")
    tape.add([(other, tape.gradient(other, TURNED))], [(folded, None if lies else size)])
    keeps = [other if lies else folded, *([matrix] if needs_gradient(tape.local, other) else [])]
    reads = [(folded, tape.gradient(other, size)), (matrix, tape.bytes_of(matrix))]
    tape.add(reads, tape.outputs_of(step) if single else [(product, whole)], keeps)
    if not single:
        several = prod(layouts[other].sizes[:-2]) > 1
        tape.add([(product, whole if several else TURNED), (folded, None)], tape.outputs_of(step))


def passing_copies(tape: Tape, step: Step) -> int:
    """Bytes of the factors that a batched product copies to fold them, where it keeps one of the copies for no gradient."""
    layouts = [tape.local.layouts[value] for value in step.operands[:2]]
    if len(layouts[0].sizes) < 2 or len(layouts[1].sizes) < 3:
        return 0
    lead = broadcast_sizes(layouts[0].sizes[:-2], layouts[1].sizes[:-2])
    total = 0
    for at, layout in enumerate(layouts):
        kept = step.differentiable and needs_gradient(tape.local, step.operands[1 - at])
        if not kept and len(lead) > 1 and not folds(layout, lead):
            total += layout.size_bytes // max(prod(layout.sizes[:-2]), 1) * prod(lead)
    return total + step.extra_bytes if total else 0

