"""One form of ``einsum``: letters for every dim, an arrow, two operands with something to sum over between them. The rest of
it is what torch makes of it: sums of one operand, views, and plain products.

Source: aten/src/ATen/native/Linear.cpp of torch 2.13, ``einsum`` and ``sumproduct_pair``: operands are contracted in pairs,
from left to right unless a path says which; an ellipsis stands for leading dims of the result; without an arrow the result has
the letters that occur once, in alphabetical order; what is summed in one operand alone is summed first.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.ir.body import Node
from planner.ir.types import Argument, Extent, Ref, TensorType

ELLIPSIS = "..."


@dataclass(frozen=True)
class _Term:
    """An operand: its letters, the value and its type."""

    letters: str
    value: str
    type: TensorType


def in_pairs(node: Node, types: Mapping[str, TensorType]) -> Iterator[Node]:
    """The ``einsum`` as one of explicit equations for each pair of operands, or what torch makes of a pair, the last under its
    own name. As it stands where an ellipsis stands for dims that are broadcast."""
    arguments = dict(node.arguments)
    equation = arguments["equation"]
    operands = [types[name] for name in node.operands]
    assert isinstance(equation, str)
    spelled = _spelled(equation.replace(" ", ""), operands)
    if spelled is None:
        yield node
        return
    terms, result = spelled
    waiting = [_Term(*each) for each in zip(terms, node.operands, operands, strict=True)]
    for at, pair in enumerate(_pairs(arguments.get("path"), len(terms))):
        taken = [waiting[place] for place in pair]
        waiting = [operand for place, operand in enumerate(waiting) if place not in pair]
        left = {letter for term in (*(term.letters for term in waiting), result) for letter in term}
        letters = dict.fromkeys(letter for term in taken for letter in term.letters if letter in left)
        made, name = ("".join(letters), f"{node.name}_pair_{at}") if waiting else (result, node.name)
        extents = _extents(taken)
        type_ = TensorType(tuple(extents[letter] for letter in made), node.type.dtype)
        yield from _contraction(replace(node, name=name, types=(type_,)), taken, made)
        waiting.append(_Term(made, name, type_))


def _contraction(node: Node, taken: Sequence[_Term], made: str) -> Iterator[Node]:
    """One or two operands as what torch makes of them; an ``einsum`` where that is a product of matrices, or has a diagonal, or
    sums along dims that are broadcast."""
    diagonal = any(len(set(term)) != len(term) for term in (*(each.letters for each in taken), made))
    sums = {letter for letter in taken[0].letters if letter in taken[-1].letters and letter not in made}
    extents = [{dict(zip(each.letters, each.type.shape, strict=True))[letter] for each in taken} for letter in sorted(sums)]
    if diagonal or (len(taken) == 2 and any(len(found) > 1 or found == {1} for found in extents)):
        yield _explicit(node, taken, made)
        return
    chain = _Chain(node)
    if len(taken) == 1:
        chain.lined_up(chain.summed(taken[0], made), made)
        if not chain.nodes:
            chain.viewed(taken[0])
    else:
        first, second = (chain.summed(each, made + other.letters) for each, other in zip(taken, reversed(taken), strict=True))
        if sums:
            chain.nodes.append(_explicit(node, (first, second), made))
        else:
            chain.multiplied(chain.lined_up(first, made), chain.lined_up(second, made))
    *steps, last = chain.nodes
    yield from steps
    yield replace(last, name=node.name)


def _explicit(node: Node, taken: Sequence[_Term], made: str) -> Node:
    said: tuple[tuple[str, Argument], ...] = (
        ("equation", f"{','.join(term.letters for term in taken)}->{made}"),
        ("tensors", tuple(Ref(term.value) for term in taken)), ("path", None),
    )
    return replace(node, arguments=said)


@dataclass
class _Chain:
    """Operations that stand for a ``node``; the last is to have its name."""

    node: Node
    nodes: list[Node] = field(default_factory=list)

    def _add(self, op: str, type_: TensorType, *arguments: tuple[str, Argument]) -> str:
        name = f"{self.node.name}_part_{len(self.nodes)}"
        self.nodes.append(replace(self.node, name=name, op=op, types=(type_,), arguments=arguments))
        return name

    def summed(self, term: _Term, wanted: str) -> _Term:
        """Without the letters that nobody wants."""
        dims = tuple(at for at, letter in enumerate(term.letters) if letter not in wanted)
        if not dims:
            return term
        shape = tuple(extent for at, extent in enumerate(term.type.shape) if at not in dims)
        type_ = TensorType(shape, term.type.dtype)
        value = self._add(
            "sum.dim_IntList", type_, ("self", Ref(term.value)), ("dim", dims), ("keepdim", False), ("dtype", None)
        )
        return _Term("".join(letter for letter in term.letters if letter in wanted), value, type_)

    def lined_up(self, term: _Term, made: str) -> _Term:
        """With the dims of the result, in their order."""
        order = tuple(term.letters.index(letter) for letter in made if letter in term.letters)
        if order != tuple(range(len(order))):
            type_ = TensorType(tuple(term.type.shape[dim] for dim in order), term.type.dtype)
            value = self._add("permute", type_, ("self", Ref(term.value)), ("dims", order))
            term = _Term("".join(term.letters[dim] for dim in order), value, type_)
        for at, letter in enumerate(made):
            if letter not in term.letters:
                shape, letters = term.type.shape, term.letters
                type_ = TensorType((*shape[:at], 1, *shape[at:]), term.type.dtype)
                value = self._add("unsqueeze", type_, ("self", Ref(term.value)), ("dim", at))
                term = _Term(letters[:at] + letter + letters[at:], value, type_)
        return term

    def viewed(self, term: _Term) -> None:
        """As it is."""
        self._add("alias", term.type, ("self", Ref(term.value)))

    def multiplied(self, first: _Term, second: _Term) -> None:
        """Element by element."""
        self._add("mul.Tensor", self.node.type, ("self", Ref(first.value)), ("other", Ref(second.value)))


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


def _extents(taken: Sequence[_Term]) -> dict[str, Extent]:
    """Of each letter; an operand of extent 1 is broadcast along it."""
    found: dict[str, Extent] = {}
    for term in taken:
        for letter, extent in zip(term.letters, term.type.shape, strict=True):
            if found.get(letter, 1) == 1:
                found[letter] = extent
    return found
