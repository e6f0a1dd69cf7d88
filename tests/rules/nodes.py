"""Nodes for tests: an operation called on real tensors, written down as the tracer would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.placement import OpStrategy
from planner.ir.types import Dtype, Ref, TensorType
from planner.rules import strategies
from tests.oracles.sharded_op import check, positions

DROPPED = {"device", "layout", "memory_format", "pin_memory"}


@dataclass(frozen=True)
class Call:
    """A node with the whole tensors that it is called on."""

    node: Node
    operands: tuple[Tensor, ...]

    @property
    def types(self) -> Mapping[str, TensorType]:
        return {name: type_of(tensor) for name, tensor in zip(self.node.operands, self.operands, strict=True)}

    @property
    def differentiable(self) -> frozenset[str]:
        named = zip(self.node.operands, self.operands, strict=True)
        carried = {name for name, tensor in named if tensor.requires_grad}
        return frozenset(carried | ({self.node.name} if self.node.differentiable else set()))

    def strategies(self, degree: int) -> tuple[OpStrategy, ...]:
        return strategies(self.node, self.types, degree, self.differentiable)

    def check(self, degree: int) -> tuple[str, ...]:
        """Every strategy against the oracle; their names."""
        found = self.strategies(degree)
        for strategy in found:
            check(self.node, strategy, degree, self.operands, lockstep=LOCKSTEP)
        return tuple(strategy.name for strategy in found)


def type_of(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def call(op: str, *arguments: Any, **keywords: Any) -> Call:
    """A node of ``op`` (with its overload) on these arguments, every other one at its default."""
    name, _, overload = op.partition(".")
    operation = getattr(getattr(torch.ops.aten, name), overload or "default")
    operands: list[Tensor] = []
    written: list[tuple[str, Any]] = []
    for at, argument in enumerate(operation._schema.arguments):
        if argument.name not in DROPPED:
            value = arguments[at] if at < len(arguments) else keywords.get(argument.name, argument.default_value)
            written.append((argument.name, _written(value, operands)))
    result = operation(*arguments, **keywords)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    carries = any(output.requires_grad for output in outputs)
    node = Node("out", op, tuple(written), tuple(map(type_of, outputs)), differentiable=carries)
    return Call(node, tuple(operands))


def _written(value: Any, operands: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        operands.append(value)
        return Ref(f"x{len(operands) - 1}")
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if isinstance(value, (list, tuple)):
        return tuple(_written(item, operands) for item in value)
    return value


def real(*shape: int, low: float | None = None, gradient: bool = True) -> Tensor:
    """Random numbers that carry a gradient; ``low``: uniform from there to one above it."""
    tensor = torch.randn(shape, dtype=torch.float64) if low is None else torch.rand(shape, dtype=torch.float64) + low
    return tensor.requires_grad_(gradient)


def fixed(*shape: int) -> Tensor:
    """Random numbers without gradient."""
    return real(*shape, gradient=False)


def whole_numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def truths(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.5


Held = Sequence[Sequence[Tensor]]


def _embedding(node: Node, strategy: OpStrategy, held: Held) -> list[Tensor] | None:
    """Every rank looks up the rows that it holds, zero elsewhere; the padding row has no gradient."""
    lies = strategy.operands[0]
    if lies.state != "shard" or lies.dim != 0:
        return None
    extent = sum(rank[0].shape[0] for rank in held)
    outputs = []
    for at, (weight, indices) in enumerate(held):
        rows = positions(extent, lies, len(held), at)
        place = torch.full((extent,), -1)
        place[rows] = torch.arange(len(rows))
        local = place[indices]
        looked_up = weight[local.clamp(min=0)]
        looked_up = torch.where((indices == node.argument("padding_idx")).unsqueeze(-1), looked_up.detach(), looked_up)
        outputs.append(looked_up * (local >= 0).unsqueeze(-1))
    return outputs


def _cross_entropy(node: Node, strategy: OpStrategy, held: Held) -> list[Tensor] | None:
    """Three sums over the ranks; the gradient of each rank's logits is softmax minus one at the target, from its own."""
    lies = strategy.operands[0]
    if lies.state != "shard" or lies.dim != 1:
        return None
    extent = sum(rank[0].shape[1] for rank in held)
    target = held[0][1]
    counted = target != node.argument("ignore_index")
    largest = torch.stack([rank[0].detach().amax(1) for rank in held]).amax(0)
    exponents = [(rank[0].detach() - largest[:, None]).exp() for rank in held]
    total = torch.stack([part.sum(1) for part in exponents]).sum(0)
    hits, surrogates = [], []
    for at, (logits, _) in enumerate(held):
        hit = torch.tensor(positions(extent, lies, len(held), at))[None] == target[:, None]
        hits.append((logits.detach() * hit).sum(1))
        slope = (exponents[at] / total[:, None] - hit.double()) * counted[:, None]
        surrogates.append((slope * logits).sum())
    loss = ((total.log() + largest - torch.stack(hits).sum(0)) * counted).sum()
    return [loss + surrogate - surrogate.detach() for surrogate in surrogates]


def _softmax(node: Node, strategy: OpStrategy, held: Held) -> list[Tensor] | None:
    lies = strategy.operands[0]
    dim = node.argument("dim")
    assert isinstance(dim, int)
    if lies.state != "shard" or lies.dim != dim % node.type.rank:
        return None
    parts = [rank[0] for rank in held]
    largest = torch.stack([part.detach().amax(dim, keepdim=True) for part in parts]).amax(0)
    total = torch.stack([(part - largest).exp().sum(dim, keepdim=True) for part in parts]).sum(0)
    if node.base == "log_softmax":
        return [part - largest - total.log() for part in parts]
    return [(part - largest).exp() / total for part in parts]


LOCKSTEP: Mapping[str, Callable[[Node, OpStrategy, Held], list[Tensor] | None]] = {
    "embedding": _embedding, "cross_entropy_loss": _cross_entropy, "softmax": _softmax, "log_softmax": _softmax,
}
