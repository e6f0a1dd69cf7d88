"""The input part of a split backward pass, where a stage hands on values that get no gradient.

torch's own (``torch.distributed.pipelining._backward.stage_backward_input``) leaves such values out since 2.13; before, it asks
autograd for their gradients, and wants one for every input. This is 2.13's, for all versions, but that it leaves nothing in
the inputs' ``grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, construct_reverse_graph, get_param_groups

from .weight_part import Groups


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, inputs: Sequence[Tensor], parameters: Iterable[Tensor]
) -> tuple[tuple[Tensor | None, ...], Groups]:
    """The gradient of every input (None: it wants none, or there is none), and what the weight part begins with.

    ``gradients``: of the outputs; None of those that want none, or in place of all where the outputs are the loss.
    """
    gradients = [torch.ones_like(output) for output in outputs] if gradients is None else gradients
    answered = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    ends, given = [output for output, _ in answered], [gradient for _, gradient in answered]
    asked = [at for at, value in enumerate(inputs) if value.requires_grad]
    groups: Groups = get_param_groups(_nodes(inputs), _nodes(parameters), construct_reverse_graph(_nodes(ends)))
    handles = [handle for group in groups for handle in _keep_what_comes(group)]
    made: list[Tensor | None] = [None] * len(inputs)
    try:
        if ends and asked:
            found = torch.autograd.grad(ends, [inputs[at] for at in asked], given, retain_graph=True, allow_unused=True)
            for at, gradient in zip(asked, found, strict=True):
                made[at] = gradient
    finally:
        for handle in handles:
            handle.remove()
    for output in outputs:
        output.detach_()  # Lets go of the graph behind it, but for what the weight part needs.
    return tuple(made), groups


def _nodes(tensors: Iterable[Tensor]) -> list[Any]:
    found = map(_get_grad_fn_or_grad_acc, tensors)
    return [node for node in found if node is not None]


def _keep_what_comes(group: dict[str, Any]) -> list[Any]:
    """Let a group keep what comes into its nodes (``grads``, in the order of ``intermediates``); the hooks that do."""
    group["intermediates"] = list(group["intermediates"])
    group["grads"] = [()] * len(group["intermediates"])
    return [node.register_prehook(partial(group["grads"].__setitem__, at)) for at, node in enumerate(group["intermediates"])]
