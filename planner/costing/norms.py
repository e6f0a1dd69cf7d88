"""Operations that divide by a norm, taken apart as torch composes them (see :mod:`planner.costing.primitives`)."""

from __future__ import annotations

from math import prod

from planner.costing.local import Step
from planner.costing.tape import PART, PASS, Tape
from planner.ir.types import DTYPE_BYTES, HALF
from planner.ops.layout import broadcast_sizes, row_major


def composed_rms_norm(tape: Tape, step: Step) -> None:
    """torch's composite (aten/src/ATen/native/layer_norm.cpp, ``rms_norm_composite``): [cast], square, mean, rsqrt, two
    products, [a copy into rows], [cast]. A product's backward is a product an operand, then a sum where the operand was
    broadcast."""
    x, weight = step.operands[0], step.operands[1] if len(step.operands) > 1 else None
    half = tape.local.types[x].dtype in HALF
    item = DTYPE_BYTES[tape.local.types[x].dtype]
    wide = max(4, item) if half else item
    size = tape.bytes_of(x) // item * wide
    assert step.node is not None
    normalized = step.node.argument("normalized_shape")
    width = prod(int(str(extent)) for extent in normalized) if isinstance(normalized, tuple) else 1
    rows = size // max(width, 1)
    lined = not tape.local.layouts[x].in_order
    source = x
    if half:
        source = tape.name("wide")
        tape.add([(x, tape.gradient(x, tape.bytes_of(x)))], [(source, size)], follows=True)
    turns = [source] if lined else []
    need = tape.gradient(x, size)
    square, mean, root, normal = (tape.name(n) for n in ("square", "mean", "root", "normal"))
    tape.add([(source, need)], [(square, size)], [source] if need else [], backward=2 * size, turns=turns)
    tape.add([(square, need)], [(mean, rows)])
    tape.temporary.add(square)
    # An expression's parts live until it is over, the square too.
    tape.add([(mean, rows if need else None), (square, None)], [(root, rows)], [root] if need else [], backward=2 * rows)
    result = step.outputs[0]
    scaled = result if weight is None and not half and not lined else normal
    keeps = [source, root] if need else []
    tape.add([(source, need), (root, rows if need else None)], [(scaled, size)], keeps, backward=size, turns=turns)
    if weight is not None:
        scaled = tape.name("scaled") if half or lined else result
        made = tape.gradient(weight, tape.bytes_of(weight))
        keeps = [normal] if made is not None else []
        tape.add(
            [(normal, need), (weight, made), (root, None)], [(scaled, size)], [*keeps, *([weight] if need else [])],
            sums=[] if made is None else [(weight, size + (made // item * wide if half else 0))],
        )
    # The composite's own variables live until it returns.
    own = [(value, None) for value in (source, root)]
    if lined:
        before, scaled = scaled, tape.name("lined") if half else result
        tape.add([(before, PASS if step.differentiable else None), *own], [(scaled, size)])
    if half:
        tape.add([(scaled, size if step.differentiable else None), *own], tape.outputs_of(step))


def cosine_similarity(tape: Tape, step: Step) -> None:
    """Each operand by its own norm, then a product and its sum (aten/src/ATen/native/Distance.cpp, ``cosine_similarity``)."""
    layouts, rows = [tape.local.layouts[value] for value in step.operands], tape.bytes_of(step.outputs[0])
    sizes = broadcast_sizes(layouts[0].sizes, layouts[1].sizes)
    whole, mask = row_major(sizes, layouts[0].dtype).size_bytes, tape.local.layouts[step.outputs[0]].elements
    parts, own = list[tuple[str, int | None]](), list[tuple[str, None]]()
    for at, (x, layout) in enumerate(zip(step.operands, layouts, strict=True)):
        norm, bounded, part, expanded = (tape.name(f"{name} {at}") for name in ("norm", "bounded", "part", "expanded"))
        need, size = tape.gradient(x, whole), whole
        row = None if need is None else rows
        if layout.sizes != sizes:
            tape.add([(x, tape.gradient(x, layout.size_bytes))], [(expanded, None)])
            x = expanded
        tape.add([(x, need)], [(norm, rows)], [x, norm] if need else [], backward=size + mask)
        tape.add([(norm, None if need is None else PASS)], [(bounded, rows)])
        tape.add(
            [(x, need), (bounded, row)], [(part, size)], [x, bounded] if need else [], backward=2 * size if need else 0,
            sums=[(bounded, size)] if need else [], late=1 if need else 0,
        )
        parts.append((part, need))
        own += [(part, None), (bounded, None)]  # Variables, and an expression's parts, live until it returns.
    product, least = tape.name("product"), tape.name("least norm")
    keeps = [value for (value, _), (_, need) in zip(parts, reversed(parts), strict=True) if need is not None]
    tape.add([(step.operands[0], None)], [(least, DTYPE_BYTES[tape.local.types[step.operands[0]].dtype])])
    tape.add(parts, [(product, whole)], keeps)
    tape.add([(product, PART if step.differentiable else None), (least, None), *own], tape.outputs_of(step))
    return None
