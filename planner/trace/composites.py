"""Operations that torch composes of others, taken apart where nothing is known of the whole: what they are made of is sharded,
priced and counted by its own rules, and the program runs the same kernels, each with a result of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from planner.ops.families import ELEMENTWISE_LOSSES, LABELLED_LOSSES, VIEW_FAMILY
from planner.ops.saved import has_formula
from planner.trace.turns import TURNS

WHOLE = VIEW_FAMILY | TURNS | ELEMENTWISE_LOSSES | LABELLED_LOSSES | {
    "broadcast_tensors", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "instance_norm", "ravel",
    "rrelu",
}
"""Stay as they are: later passes have their own forms, or refuse them by name."""

UNSAFE = {"unsafe_chunk": "chunk", "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes"}
"""Views that autograd takes for values of their own, because nothing reads the whole any more."""

KERNEL = torch._C.DispatchKey.CompositeImplicitAutograd


def parts(node: fx.Node) -> fx.GraphModule | None:
    """What a call of a composite operation is made of, as a function of ``node.all_input_nodes``; None where it stays whole: it
    is known, has no gradient, or its parts are no plain operations."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not _composed(target):
        return None
    base = target._schema.name.removeprefix("aten::")
    given = [each.meta.get("val") for each in node.all_input_nodes]
    if base in WHOLE or has_formula(base) or not _floating(node.meta.get("val")):
        return None
    fake = [value for value in given if isinstance(value, FakeTensor)]
    if not fake or len(fake) < len(given):
        return None

    def composed(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip(node.all_input_nodes, tensors, strict=True))
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        result = target._op_dk(KERNEL, *arguments, **keywords)
        return [result] if isinstance(result, Tensor) else list(result)

    with fake[0].fake_mode:
        region = make_fx(composed)(*fake)
    region.graph.eliminate_dead_code()
    if not all(_out_of_place(inner) for inner in region.graph.nodes):
        return None
    for inner in region.graph.nodes:
        if inner.op == "get_attr" or (inner.op == "call_function" and not _plain(inner)):
            return None
        inner.meta.update({key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta})
    return region


def _out_of_place(node: fx.Node) -> bool:
    """Give an operation that overwrites a value of the region's own, which nothing else reads, a result of its own (a recurrent
    cell's gates); whether it has one now, or had."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    name = target._schema.name.removeprefix("aten::")
    if name in UNSAFE:
        node.target = getattr(getattr(torch.ops.aten, UNSAFE[name]), target._overloadname)
    elif target._schema.is_mutable:
        written, plain = node.args[0], getattr(torch.ops.aten, name.removesuffix("_"), None)
        if not isinstance(written, fx.Node) or set(written.users) != {node} or not _own(written) or plain is None:
            return False
        if target._overloadname not in plain.overloads():
            return False
        node.target = getattr(plain, target._overloadname)
    return True


def _own(node: fx.Node) -> bool:
    """Whether nothing else lies where a value lies."""
    whole = node.args[0] if node.target is operator.getitem else None
    if isinstance(whole, fx.Node):  # one of the parts that a value falls into, which is not read as a whole
        source = whole.args[0]
        return _base(whole) in UNSAFE.values() and isinstance(source, fx.Node) and set(source.users) == {whole} and _own(source)
    return node.op == "call_function" and _base(node) not in VIEW_FAMILY | TURNS


def _base(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, torch._ops.OpOverload) else ""


def _floating(value: Any) -> bool:
    values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) and each.dtype.is_floating_point for each in values)


def _composed(target: torch._ops.OpOverload) -> bool:
    """Whether torch's own kernel of it calls other operations."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), KERNEL)


def _plain(node: fx.Node) -> bool:
    """Whether it is an operation that users call too, on tensors, and changes nothing in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    name = node.target._schema.name.removeprefix("aten::")
    own = name.startswith("_") and name not in ("_softmax", "_log_softmax", "_to_copy", "_unsafe_view")
    return not own and not node.target._schema.is_mutable and node.meta.get("val") is not None
