"""Cross-entropy as torch composes it, and as the runtime computes it over a split vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.costing.local import Step
from planner.costing.tape import PART, PASS, Tape
from planner.ir.types import DTYPE_BYTES, HALF, Argument

AT_ONCE = 2**25
"""``AT_ONCE`` of runtime/vocabulary.py."""


def _said(step: Step, argument: str) -> Argument:
    return None if step.node is None else step.node.argument(argument)


def _has_labels(tape: Tape, step: Step) -> bool:
    return tape.local.types[step.operands[1]].dtype in ("int64", "int32", "uint8")


def cross_entropy(tape: Tape, step: Step) -> None:
    """``log_softmax``, then ``nll_loss``, or a product with the target where that is probabilities: each makes a gradient of
    the logits' size, one after the other (aten/src/ATen/native/LossNLL.cpp, ``cross_entropy_loss``)."""
    cast = _in_float32(tape, step)
    logits = cast[0] if cast else step.operands[0]
    size, likely = _size(tape, step), tape.name("log_softmax")
    need = tape.gradient(step.operands[0], size)
    tape.add([(logits, need)], [(likely, size)], [likely] if need else [])
    _with_likelihoods(tape, step, likely, need, cast[1:])
    tape.still_read(cast)  # The call holds what it was given until it returns.


def _in_float32(tape: Tape, step: Step) -> list[str]:
    """Logits of half precision, and weights of classes, as they are cast."""
    made = list[str]()
    for value in (step.operands[0], *step.operands[2:]):
        if tape.local.types[value].dtype in HALF:
            made.append(tape.name(f"wide {value}"))
            tape.add([(value, tape.gradient(value, tape.bytes_of(value)))], [(made[-1], 2 * tape.bytes_of(value))])
    return made


def _size(tape: Tape, step: Step) -> int:
    """Bytes of the logits as they are computed with."""
    return tape.local.layouts[step.operands[0]].elements * _item(tape, step)


def _item(tape: Tape, step: Step) -> int:
    return max(4, DTYPE_BYTES[tape.local.types[step.operands[0]].dtype])


def _with_likelihoods(tape: Tape, step: Step, likely: str, need: int | None, weights: Sequence[str]) -> None:
    """The rest, from ``log_softmax`` on; ``weights`` of classes that were cast."""
    target, size = step.operands[1], _size(tape, step)
    smoothing = bool(_said(step, "label_smoothing"))
    if not _has_labels(tape, step):
        return _expected_loss(tape, step, likely, need, smoothing, weights or step.operands[2:])
    keeps = [*(value for value in step.kept if tape.local.root.get(target) == value or value != likely), *weights]
    made = sum(2 * tape.bytes_of(value) for value in step.operands[2:]) if weights else 0
    if smoothing:
        return _smoothed_loss(tape, step, likely, need, keeps, weights or step.operands[2:])
    tape.add(
        [(likely, need), *((operand, None) for operand in step.operands[1:])], tape.outputs_of(step),
        keeps if need else [], extra=max(0, step.extra_bytes - size - made),
    )
    return None


def _expected_loss(
    tape: Tape, step: Step, likely: str, need: int | None, smoothing: bool, weights: Sequence[str]
) -> None:
    """``-(log_softmax * target * weight).sum()``; the target is moved towards even probabilities first."""
    target, size, made = step.operands[1], _size(tape, step), tape.bytes_of(step.outputs[0])
    if smoothing:
        scaled, smoothed = tape.name("scaled"), tape.name("smoothed")
        tape.add([(target, None)], [(scaled, tape.bytes_of(target))])
        tape.add([(scaled, None)], [(smoothed, tape.bytes_of(target))])
        target = smoothed
    product, summed = tape.name("product"), tape.name("summed")
    tape.add([(likely, need), (target, None)], [(product, size)], [target] if need else [])
    own = [(value, None) for value in (product, target, likely)]  # An expression's parts live until it is over, as variables.
    product = _weighed(tape, product, size, need, weights)
    tape.add([(product, PART if need else None)], [(summed, made)])
    own.append((product, None))
    tape.add([(summed, made if need else None), *own], tape.outputs_of(step))


def _weighed(tape: Tape, value: str, size: int, need: int | None, weights: Sequence[str]) -> str:
    """The product of a value of the logits' size and the weights of the classes; the value where they have none."""
    if not weights:
        return value
    product = tape.name("weighed")
    tape.add([(value, size if need else None), (weights[0], None)], [(product, size)], list(weights) if need else [])
    return product


def _smoothed_loss(
    tape: Tape, step: Step, likely: str, need: int | None, keeps: Sequence[str], weights: Sequence[str]
) -> None:
    """``(1 - s) * nll_loss + s / classes * sum`` of all that is not ignored; both parts give the logits a gradient."""
    item, made = _item(tape, step), tape.bytes_of(step.outputs[0])
    count = tape.local.layouts[step.operands[1]].elements
    rows, single = count * item, made if need else None
    names = ("likelihood", "summed", "negated", "ignored", "reduced", "first", "second")
    likelihood, summed, negated, ignored, reduced, first, second = map(tape.name, names)
    tape.add([(likely, need), (step.operands[1], None)], [(likelihood, made)], keeps if need else [], extra=item)
    even = _weighed(tape, likely, _size(tape, step), need, weights)
    tape.add([(even, PART if need else None)], [(summed, rows)])
    tape.add([(summed, rows if need else None), *([(even, None)] if weights else [])], [(negated, rows)])
    tape.add([(step.operands[1], None)], [(ignored, count)])
    filled = tape.name("filled")
    tape.add([(negated, rows if need else None), (ignored, None)], [(filled, None)], [ignored] if need else [])
    if made < rows:
        tape.add([(filled, PART if need else None)], [(reduced, made)])
    tape.add([(likelihood, single)], [(first, made)])
    tape.add([(reduced if made < rows else filled, single)], [(second, made)])
    own = [(value, None) for value in (likelihood, negated, ignored)]  # Variables live until it returns.
    tape.add([(first, PASS if need else None), (second, PASS if need else None), *own], tape.outputs_of(step))


def at_once(sizes: Sequence[int]) -> int:
    """Elements of logits that runtime/vocabulary.py computes with at a time: whole rows of the first dim."""
    if len(sizes) < 2 or not sizes[0]:
        return prod(sizes)
    row = prod(sizes[1:])
    return min(sizes[0], max(1, AT_ONCE // max(1, row))) * row


def _pieces(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Elements of a piece of the logits, how many whole ones there are, and elements of the one that is left."""
    piece = at_once(sizes)
    return piece, *(divmod(prod(sizes), piece) if piece else (0, 0))


def vocabulary_bytes(sizes: Sequence[int], wide: int) -> int:
    """What ``CrossEntropy`` has made when that is most in its forward pass: a copy of a piece of the logits, two numbers of
    ``wide`` bytes a row and the totals of the pieces until then; or seven numbers a row. (Besides: two indices and two flags a
    row; with the seven, a scalar.)"""
    classes = sizes[1 if len(sizes) > 1 else 0]
    piece, whole, rest = _pieces(sizes)
    rows, some = prod(sizes) // classes, piece // classes
    copied = max(piece + whole * some, rest + rows if rest else 0)
    return rows * (2 * wide + 2 * 8 + 2) + wide * max(copied, 5 * rows + 1)


def half_loss(tape: Tape, step: Step) -> None:
    """``HalfCrossEntropy`` of runtime/vocabulary.py: in each pass two float32 copies of some rows of the logits at a time, and
    the numbers of a row."""
    logits = step.operands[0]
    sizes, elements = tape.local.layouts[logits].sizes, tape.local.layouts[logits].elements
    classes = sizes[1 if len(sizes) > 1 else 0]
    piece, whole, rest = _pieces(sizes)
    rows, some, few = elements // classes, piece // classes, rest // classes
    need = tape.gradient(logits, elements * DTYPE_BYTES[tape.local.types[logits].dtype])
    # The targets' logarithms of the pieces before are there already.
    passing = max(2 * piece + max(0, whole - 1) * some, 2 * rest + whole * some if few else 0, 3 * rows)
    tape.add(
        [(logits, need), *((operand, None) for operand in step.operands[1:])],
        [(step.outputs[0], 4)], [logits] if need else [], extra=rows * (8 + 1),
        forward=4 * passing + rows * (8 + 1), backward=4 * (piece + max(piece, 2 * some)),
    )


def vocabulary_loss(tape: Tape, step: Step) -> None:
    """``CrossEntropy`` of runtime/vocabulary.py: in each pass a float32 copy of some rows of the logits at a time, and the
    numbers of a row."""
    logits = step.operands[0]
    elements = tape.local.layouts[logits].elements
    item = DTYPE_BYTES[tape.local.types[logits].dtype]
    wide = max(4, item)
    sizes = tape.local.layouts[logits].sizes
    classes = sizes[1 if len(sizes) > 1 else 0]
    rows, piece = elements // classes, at_once(sizes)
    need = tape.gradient(logits, elements * item)
    # What is taken off is cast, and negated.
    beside = 2 * piece // classes * wide
    tape.add(
        [(logits, need), *((operand, None) for operand in step.operands[1:])],
        [(step.outputs[0], wide)], [logits] if need else [], extra=rows * (wide + 8 + 1 + 1),
        forward=vocabulary_bytes(sizes, wide) - wide,  # The loss itself is not made by then.
        backward=beside + (piece * wide if item < wide else 0),
    )
