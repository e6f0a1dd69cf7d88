"""Wrong programs: every single edit of an emitted model that a sharding bug could amount to."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COLLECTIVES = ("copy", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all", "embedding", "cross_entropy")
CONJUGATE = {"copy": "all_reduce", "all_reduce": "copy", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True)
class Mutant:
    """A changed model.py and what was done to it."""

    name: str
    text: str


def _sites(tree: ast.AST, wanted: Callable[[ast.Call], bool]) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and wanted(node)]


def _is_collective(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute) and call.func.attr in COLLECTIVES
        and isinstance(call.func.value, ast.Name) and call.func.value.id == "tp"
    )


def _is_declaration(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "declare"


def _edited(tree: ast.Module, wanted: Callable[[ast.Call], bool], index: int, edit: Callable[[ast.Call], ast.expr]) -> str:
    changed = copy.deepcopy(tree)
    site = _sites(changed, wanted)[index]

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if node is site:
                return edit(node)
            return self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(changed)))


def _without(call: ast.Call, keyword: str) -> ast.Call:
    call.keywords = [k for k in call.keywords if k.arg != keyword]
    return call


def _conjugate(call: ast.Call) -> ast.Call:
    assert isinstance(call.func, ast.Attribute)
    call.func.attr = CONJUGATE[call.func.attr]
    return _without(call, "gradient") if call.func.attr in ("copy", "reduce_scatter") else call


def _plain_embedding(call: ast.Call) -> ast.expr:
    """The lookup without the mask of the own part."""
    ids, weight = call.args[:2]
    text = f"F.embedding({ast.unparse(ids)} % {ast.unparse(weight)}.shape[0], {ast.unparse(weight)})"
    return ast.parse(text, mode="eval").body


def _plain_loss(call: ast.Call) -> ast.expr:
    logits, target = (ast.unparse(a) for a in call.args[:2])
    text = f"F.cross_entropy({logits}, {target} % {logits}.shape[1], reduction='sum')"
    return ast.parse(text, mode="eval").body


def _other_dim(call: ast.Call) -> ast.Call:
    for keyword in call.keywords:
        if keyword.arg == "shard" and isinstance(keyword.value, ast.Constant):
            keyword.value = ast.Constant(1 - keyword.value.value)
    return call


def mutants(model: str) -> Iterator[Mutant]:
    """Each with one edit: a collective removed, a conjugate swapped, a parameter split on its other dim, a sum of partial
    gradients skipped."""
    tree = ast.parse(model)
    for index, call in enumerate(_sites(tree, _is_collective)):
        assert isinstance(call.func, ast.Attribute)
        kind, where = call.func.attr, f"line {call.lineno}: {ast.unparse(call)[:60]}"
        if kind == "embedding":
            yield Mutant(f"no mask, {where}", _edited(tree, _is_collective, index, _plain_embedding))
        elif kind == "cross_entropy":
            yield Mutant(f"local loss, {where}", _edited(tree, _is_collective, index, _plain_loss))
        else:
            yield Mutant(f"removed, {where}", _edited(tree, _is_collective, index, lambda c: c.args[0]))
        if kind in CONJUGATE:
            yield Mutant(f"conjugate, {where}", _edited(tree, _is_collective, index, _conjugate))
    for index, call in enumerate(_sites(tree, _is_declaration)):
        names = {k.arg: k.value for k in call.keywords}
        where = f"line {call.lineno}: {ast.unparse(call)[:60]}"
        shape = call.args[1]
        if "shard" in names and isinstance(shape, ast.Tuple) and len(shape.elts) == 2:
            yield Mutant(f"other dim, {where}", _edited(tree, _is_declaration, index, _other_dim))
        if "partial_gradient" in names:
            edit: Callable[[ast.Call], ast.expr] = lambda c: _without(c, "partial_gradient")  # noqa: E731
            yield Mutant(f"no partial sum, {where}", _edited(tree, _is_declaration, index, edit))
