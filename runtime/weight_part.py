"""The weight part of a split backward pass, where parameters are read in several places.

torch runs it from the nodes in which a parameter's path meets that of the inputs (``stage_backward_weight``). Where one of them
leads to another, it would go over what lies between once more, collectives among it, for gradients that it has already: here
none flow between them. And torch 2.11 takes what came for any output of a node for its first output's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

from .own_gradients import OwnMemory

Groups = list[dict[str, Any]]
"""torch's: parameters, the nodes where they join the path of the inputs (``intermediates``), and what came into these."""


def backward_weights(module: nn.Module, groups: Groups) -> None:
    """Gradients of the module's parameters, from what came into the nodes that they join."""
    over_others, alone = _arranged(groups)
    if over_others:
        _accumulate(module, over_others, retain_graph=True)
    _accumulate(module, alone, retain_graph=False)


def _accumulate(module: nn.Module, groups: Groups, *, retain_graph: bool) -> None:
    """torch 2.13's ``stage_backward_weight``, group by group; a group forgets its nodes before its pass and what came into them
    after."""
    owners = {_get_grad_fn_or_grad_acc(parameter): parameter for parameter in module.parameters()}
    for group in groups:
        edges, came = list[GradientEdge](), list[Tensor]()
        for node, gradients in zip(group.pop("intermediates"), group["grads"], strict=True):
            for output, gradient in enumerate(gradients):
                if gradient is not None:
                    edges.append(GradientEdge(node, output))
                    came.append(gradient)
        if not edges:
            continue
        joined = list(group["params"])
        made = torch.autograd.grad(edges, [GradientEdge(node, 0) for node in joined], came, retain_graph=retain_graph)
        del group["grads"]
        memory = OwnMemory(came)  # torch's accumulation copies what others hold; its ``grad`` leaves that to the caller
        for node, gradient in zip(joined, made, strict=True):
            parameter = owners[node]
            if parameter.grad is not None:
                parameter.grad += gradient
            else:
                parameter.grad = memory.give(gradient)


def _arranged(groups: Groups) -> tuple[Groups, Groups]:
    """The groups whose weight part calls nodes of other groups, which it would free for those that need them after (or find
    freed), and the others; the way between a group's own nodes is cut."""
    groups = _disjoint(groups)
    owner = {node: at for at, group in enumerate(groups) for node in group["intermediates"]}
    over_others, alone = Groups(), Groups()
    for at, group in enumerate(groups):
        way = _between(group["intermediates"])
        _cut(group["intermediates"], way)
        (over_others if any(owner.get(node, at) != at for node in way) else alone).append(group)
    return over_others, alone


def _disjoint(groups: Groups) -> Groups:
    """The groups, those with a parameter in common as one, in the first one's place. torch leaves a parameter that joins at
    nodes of an earlier group and at others in two groups, or not, by the order of a set (``get_param_groups``); its gradient
    would be counted twice."""
    found = Groups()
    for group in groups:
        first, *others = [each for each in [*found, group] if not each["params"].isdisjoint(group["params"])]
        for other in others:
            _absorb(first, other)
        found = [each for each in [*found, group] if each]
    return found


def _absorb(group: dict[str, Any], other: dict[str, Any]) -> None:
    """Let a group have what another has, which is empty then: nothing else holds that."""
    came = dict(zip(group["intermediates"], group["grads"], strict=True))
    came |= dict(zip(other["intermediates"], other["grads"], strict=True))
    group["params"] = group["params"] | other["params"]
    group["intermediates"], group["grads"] = list(came), list(came.values())
    other.clear()


def _between(nodes: Collection[Any]) -> set[Any]:
    """Nodes of autograd's graph from which a way leads from one of ``nodes`` to another."""
    if len(nodes) < 2:
        return set()
    readers: dict[Any, list[Any]] = {}
    seen, ahead = set(nodes), list(nodes)
    while ahead:
        node = ahead.pop()
        for following, _ in node.next_functions:
            if following is not None:
                readers.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    ahead.append(following)
    found, back = set[Any](), list(nodes)
    while back:
        for node in readers.get(back.pop(), ()):
            if node not in found:
                found.add(node)
                back.append(node)
    return found


def _cut(nodes: Collection[Any], way: set[Any]) -> None:
    """Let no gradient out of ``nodes`` on the ``way`` to another of them. What lies between is still called, without one: then
    torch's own nodes do nothing, and neither do functions that are given None in place of zeros."""
    ahead = way.union(nodes)
    for node in way:
        if node in nodes:
            led = tuple(following in ahead for following, _ in node.next_functions)
            node.register_hook(partial(_without, led))
        elif isinstance(node, BackwardCFunction):
            node.set_materialize_grads(False)


def _without(
    led: Sequence[bool], made: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(None if cut else gradient for cut, gradient in zip(led, made, strict=True))
