"""Operations that torch composes of others, taken apart where nothing is known of the whole: what they are made of is sharded,
priced and counted by its own rules, and the program runs the same kernels."""

from __future__ import annotations

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
    "broadcast_tensors", "dropout_", "feature_dropout", "alpha_dropout", "instance_norm", "ravel", "rrelu",
}
"""Stay as they are: later passes have their own forms, or refuse them by name."""

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
    for inner in region.graph.nodes:
        if inner.op == "get_attr" or (inner.op == "call_function" and not _plain(inner)):
            return None
        inner.meta.update({key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta})
    return region


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
