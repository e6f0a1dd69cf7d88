"""One form of ``einsum``: letters for every dim, an arrow, two operands at most.

Source: aten/src/ATen/native/Linear.cpp of torch 2.13, ``einsum``: operands are contracted in pairs, from left to right unless a
path says which; an ellipsis stands for leading dims of the result; without an arrow the result has the letters that occur once,
in alphabetical order.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.ir.graph import Node
from planner.ir.types import Argument, Extent, Ref, TensorType

ELLIPSIS = "..."


def in_pairs(node: Node, types: Mapping[str, TensorType]) -> Iterator[Node]:
    """The ``einsum`` as one of explicit equations for each pair of operands, the last under its own name. As it stands where
    an ellipsis stands for dims that are broadcast."""
    arguments = dict(node.arguments)
    equation = arguments["equation"]
    operands = [types[name] for name in node.operands]
    assert isinstance(equation, str)
    spelled = _spelled(equation.replace(" ", ""), operands)
    if spelled is None:
        yield node
        return
    terms, result = spelled
    waiting = list(zip(terms, node.operands, operands, strict=True))
    for at, pair in enumerate(_pairs(arguments.get("path"), len(terms))):
        taken = [waiting[place] for place in pair]
        waiting = [operand for place, operand in enumerate(waiting) if place not in pair]
        left = {letter for term in (*(term for term, _, _ in waiting), result) for letter in term}
        letters = dict.fromkeys(letter for term, _, _ in taken for letter in term if letter in left)
        made, name = ("".join(letters), f"{node.name}_pair_{at}") if waiting else (result, node.name)
        extents = _extents(taken)
        type_ = TensorType(tuple(extents[letter] for letter in made), node.type.dtype)
        said: tuple[tuple[str, Argument], ...] = (
            ("equation", f"{','.join(term for term, _, _ in taken)}->{made}"),
            ("tensors", tuple(Ref(operand) for _, operand, _ in taken)), ("path", None),
        )
        yield replace(node, name=name, arguments=said, types=(type_,))
        waiting.append((made, name, type_))


def _spelled(equation: str, operands: Sequence[TensorType]) -> tuple[list[str], str] | None:
    """The terms of the operands and of the result, an ellipsis replaced by letters; None where that cannot be said."""
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    hidden = [type_.rank - len(term.replace(ELLIPSIS, "")) for term, type_ in zip(terms, operands, strict=True)]
    most = max((count for term, count in zip(terms, hidden, strict=True) if ELLIPSIS in term), default=0)
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    if most > len(unused):
        return None
    letters = "".join(unused[:most])
    dims: dict[str, set[Extent]] = {}
    for at, (term, count, type_) in enumerate(zip(terms, hidden, operands, strict=True)):
        terms[at] = term.replace(ELLIPSIS, letters[most - count:])
        for letter, extent in zip(terms[at], type_.shape, strict=True):
            dims.setdefault(letter, set()).add(extent)
    if any(len(dims.get(letter, ())) > 1 for letter in letters):
        return None
    if not arrow:
        once = sorted(letter for letter in set("".join(terms)) - set(letters) if "".join(terms).count(letter) == 1)
        return terms, letters + "".join(once)
    return terms, result.replace(ELLIPSIS, letters)


def _pairs(path: Argument, count: int) -> list[tuple[int, ...]]:
    """Places of the operands that are contracted one after another; what is made goes to the end."""
    if isinstance(path, tuple) and path:
        numbers = [item for item in path if isinstance(item, int)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    if count < 3:
        return [tuple(range(count))]
    return [(0, 1), *((left - 1, 0) for left in range(count - 1, 1, -1))]


def _extents(taken: Sequence[tuple[str, str, TensorType]]) -> dict[str, Extent]:
    """Of each letter; an operand of extent 1 is broadcast along it."""
    found: dict[str, Extent] = {}
    for term, _, type_ in taken:
        for letter, extent in zip(term, type_.shape, strict=True):
            if found.get(letter, 1) == 1:
                found[letter] = extent
    return found
