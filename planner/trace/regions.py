"""Regions without a gradient (``torch.no_grad``), which torch drops when it makes a graph functional."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

DROPOUTS = frozenset({"dropout", "dropout_"})
OTHER_DROPOUTS = frozenset({"alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
"""Of whole channels, or to another value than zero. Each of both kinds is its operand where it drops nothing."""
ITSELF = frozenset({
    "atleast_1d", "atleast_2d", "atleast_3d", "conj", "conj_physical", "positive", "real", "resolve_conj", "resolve_neg",
    "to_dense",
})
"""Operations that hand back a tensor of real numbers itself, where its shape is to stay the same."""


def detach_regions(program: ExportedProgram) -> None:
    """Let what runs without a gradient read detached values, so that it has none either where its region is no longer known.

    What hands back its operand itself, or writes into it, does so in such a region too: that is the operand afterwards.
    """
    for region in _regions(program.graph_module):
        same = {node for node in region.graph.nodes if node.op == "placeholder" and _floating(node)}
        detached: dict[fx.Node, fx.Node] = {}
        for node in list(region.graph.nodes):
            if node.op != "call_function":
                continue
            own = written(node)
            if returns_operand(node):
                own = (*own, node.args[0])
            same |= {node} if own and own[0] in same else set()
            for operand in node.all_input_nodes:
                if operand not in same or operand in own:
                    continue
                if operand not in detached:
                    with region.graph.inserting_before(node):
                        detached[operand] = region.graph.call_function(torch.ops.aten.detach.default, (operand,))
                    meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
                    detached[operand].meta.update(meta, val=operand.meta["val"])
                node.replace_input_with(operand, detached[operand])
        region.recompile()


def _regions(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The outermost regions of a graph that have no gradient; those inside them read what they read."""
    for node in module.graph.nodes:
        if (body := body_of(node)) is not None:
            if without_gradient(node):
                yield body
            else:
                yield from _regions(body)


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph of a region, of its call; its placeholders are the arguments after it."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    held = (given for given in node.args if isinstance(given, fx.Node) and given.op == "get_attr")
    bodies = (getattr(node.graph.owning_module, str(given.target)) for given in held)
    return next((body for body in bodies if isinstance(body, fx.GraphModule)), None)


def without_gradient(node: fx.Node) -> bool:
    """Whether a region's call switches gradients off."""
    return "set_grad_enabled" in str(node.target) and not node.args[0]


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that an operation changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return ()
    found: list[fx.Node] = []
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = _given(node, argument.name)
            several = given if isinstance(given, (list, tuple)) else (given,)
            found.extend(each for each in several if isinstance(each, fx.Node))
    return tuple(found)


def returns_operand(node: fx.Node) -> bool:
    """Whether an operation hands back its operand itself, gradient and all even under ``no_grad``. Whoever reads the operand
    after it reads this node: the tracer knows tensors by identity."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    given, made = (item.meta.get("val") if isinstance(item, fx.Node) else None for item in (node.args[0], node))
    if not isinstance(given, Tensor) or not isinstance(made, Tensor):
        return False
    kind = str(node.target).split(".")[1]
    if kind in ("to", "type_as"):
        return given.dtype == made.dtype and not _given(node, "copy")
    if kind in DROPOUTS | OTHER_DROPOUTS:
        return _given(node, "p") == 0 or not _given(node, "train")
    if kind == "flatten":
        first, last = _given(node, "start_dim"), _given(node, "end_dim")
        return bool(given.dim()) and isinstance(first, int) and isinstance(last, int) and (first - last) % given.dim() == 0
    if kind == "contiguous":
        return given.is_contiguous()
    return kind in ITSELF and given.shape == made.shape and not given.is_complex()


def _given(node: fx.Node, name: str) -> object:
    """What a call gives an argument of its operation, or its default where it leaves it out; None where there is none."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
