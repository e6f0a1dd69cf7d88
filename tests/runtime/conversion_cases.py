"""Conversions and vocabulary-parallel operations on one rank, compared with the whole; run by the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import vocabulary
from runtime.collectives import TensorAxis
from runtime.layout import Layout

Convert = Callable[[TensorAxis, Tensor], Tensor]
SHAPE, OF_ONE_SAMPLE = (8, 4, 12), (1, 1, 8, 4, 12)
SEGMENTS, UNIT = (4, 8), 1
CONVERSIONS: dict[str, tuple[str, str, Convert]] = {
    "copy": ("replicate", "shared", lambda tp, x: tp.copy(x)),
    "all_reduce": ("partial", "replicate", lambda tp, x: tp.all_reduce(x)),
    "all_reduce, partial gradient": ("partial", "shared", lambda tp, x: tp.all_reduce(x, gradient="all_reduce")),
    "all_gather": ("shard 0", "shared", lambda tp, x: tp.all_gather(x, dim=0)),
    "all_gather of a middle dim": ("shard 1", "shared", lambda tp, x: tp.all_gather(x, dim=1)),
    "all_gather, sliced gradient": ("shard 2", "replicate", lambda tp, x: tp.all_gather(x, dim=-1, gradient="slice")),
    "reduce_scatter": ("partial", "shard 0", lambda tp, x: tp.reduce_scatter(x, dim=0)),
    "reduce_scatter of the last dim": ("partial", "shard 2", lambda tp, x: tp.reduce_scatter(x, dim=-1)),
    "slice": ("replicate", "shard 1", lambda tp, x: tp.slice(x, dim=1)),
    "slice, padded gradient": ("shared", "shard 1", lambda tp, x: tp.slice(x, dim=1, gradient="pad")),
    "slice in segments": (
        "shared", "shard 2 segments", lambda tp, x: tp.slice(x, dim=2, gradient="pad", unit=UNIT, segments=SEGMENTS)
    ),
    "all_to_all": ("shard 0", "shard 1", lambda tp, x: tp.all_to_all(x, split_dim=1, concat_dim=0)),
    "all_to_all of the last dim": ("shard 2", "shard 0", lambda tp, x: tp.all_to_all(x, split_dim=0, concat_dim=2)),
}


def axis() -> TensorAxis:
    """The tensor axis over the whole world."""
    return TensorAxis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same tensor on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def part(full: Tensor, kind: str, tp: TensorAxis) -> Tensor:
    """What this rank holds of ``full``: all of it, its slice, or one of the terms of which it is the sum."""
    if kind.startswith("shard"):
        _, dim, *rest = kind.split()
        layout = Layout(tuple(full.shape), tp.degree, int(dim), SEGMENTS if rest else (), UNIT)
        return layout.take(full, tp.rank).clone()
    if kind == "sum":
        terms = [random(*full.shape, seed=100 + rank, dtype=full.dtype) for rank in range(tp.degree - 1)]
        return ([*terms, full - torch.stack(terms).sum(0)] if terms else [full])[tp.rank]
    return full.clone()


def error(local: Tensor, full: Tensor, kind: str, tp: TensorAxis) -> float:
    """How far ``local`` is from what this rank should hold of ``full``; for ``sum`` the terms are added up first."""
    if kind == "sum":
        local = local.clone()
        dist.all_reduce(local)
        return float((local - full).abs().max())
    return float((local - part(full, kind, tp)).abs().max())


class _Copies(TorchDispatchMode):
    """Counts what is joined."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.cat.default
        return function(*args, **(kwargs or {}))


def conversions_of_one_sample() -> list[tuple[float, float, int]]:
    """(forward and backward errors, copies) of a gather and of a scatter along a dim outside of which no dim has an extent."""
    tp, found = axis(), []
    x, upstream = random(*OF_ONE_SAMPLE), random(*OF_ONE_SAMPLE, seed=1)
    for convert, source, target, arrives, leaves in (
        (tp.all_gather, "shard 2", "replicate", "sum", "shard 2"),
        (tp.reduce_scatter, "sum", "shard 2", "shard 2", "replicate"),
    ):
        local = part(x, source, tp).requires_grad_()
        given = part(upstream, arrives, tp)
        with _Copies() as copies:
            result = convert(local, 2)
            result.backward(given)
        assert result.is_contiguous() and not result._is_view() and local.grad is not None
        found.append((error(result.detach(), x, target, tp), error(local.grad, upstream, leaves, tp), copies.count))
    return found


def conversion_errors(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """(forward, backward) errors of one conversion."""
    source, target, convert = CONVERSIONS[name]
    tp = axis()
    values = {"partial": "sum", "shared": "replicate"}
    gradients = {"partial": "replicate", "shared": "sum"}
    x, upstream = random(*SHAPE, dtype=dtype), random(*SHAPE, seed=1, dtype=dtype)
    local = part(x, values.get(source, source), tp).requires_grad_()
    result = convert(tp, local)
    assert result.is_contiguous(), "what does not lie row by row cannot be sent"
    result.backward(part(upstream, gradients.get(target, target), tp))
    assert local.grad is not None
    return (
        error(result.detach(), x, values.get(target, target), tp),
        error(local.grad, upstream, gradients.get(source, source), tp),
    )


def integer_conversions() -> bool:
    """Integers go through the conversions without a gradient."""
    tp = axis()
    ids = torch.arange(8 * tp.degree).reshape(-1, 4)
    assert torch.equal(tp.all_gather(tp.slice(ids, dim=0), dim=0), ids)
    assert torch.equal(tp.slice(torch.arange(7), dim=0), Layout((7,), tp.degree, 0).take(torch.arange(7), tp.rank))
    return True


def embedding_errors(vocabulary: int, padding: int | None) -> tuple[float, float]:
    """(forward, weight gradient) errors of the vocabulary-parallel embedding."""
    tp = axis()
    weight, upstream = random(vocabulary, 6).requires_grad_(), random(5, 7, 6, seed=1)
    ids = torch.randint(vocabulary, (5, 7), generator=torch.Generator().manual_seed(3))
    F.embedding(ids, weight, padding).backward(upstream)
    own = part(weight.detach(), "shard 0", tp).requires_grad_()
    partial = tp.embedding(ids, own, vocabulary=vocabulary, padding_index=padding)
    partial.backward(upstream)
    assert own.grad is not None and weight.grad is not None
    forward = error(partial.detach(), F.embedding(ids, weight.detach()), "sum", tp)
    return forward, error(own.grad, weight.grad, "shard 0", tp)


def cross_entropy_in_pieces(shape: tuple[int, ...], dtype: torch.dtype, at_once: int) -> tuple[float, float]:
    """The same, some rows at a time."""
    usual, vocabulary.AT_ONCE = vocabulary.AT_ONCE, at_once
    try:
        return cross_entropy_errors(shape, dtype)
    finally:
        vocabulary.AT_ONCE = usual


def cross_entropy_errors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, float]:
    """(loss, logits' gradient) errors of the vocabulary-parallel cross-entropy with ignored targets."""
    tp = axis()
    classes = shape[1]
    logits = (5 * random(*shape)).to(dtype)
    target = torch.randint(classes, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(3))
    target.reshape(-1)[::5] = -100
    whole = logits.clone().to(torch.float32 if dtype == torch.bfloat16 else dtype).requires_grad_()
    expected = 0.25 * F.cross_entropy(whole, target, reduction="sum")
    expected.backward()
    own = part(logits, "shard 1", tp).requires_grad_()
    loss = tp.cross_entropy(own, target, classes=classes)
    (0.25 * loss).backward()
    assert own.grad is not None and whole.grad is not None and own.grad.dtype == dtype
    return abs(float(0.25 * loss - expected)), error(own.grad.to(whole.dtype), whole.grad, "shard 1", tp)


def softmax_errors(logarithm: bool, dim: int) -> tuple[float, float]:
    """(forward, backward) errors of the softmax over a split dim."""
    tp = axis()
    x, upstream = random(3, 11, 5).requires_grad_(), random(3, 11, 5, seed=1)
    expected = (F.log_softmax if logarithm else F.softmax)(x, dim)
    expected.backward(upstream)
    kind = f"shard {dim % 3}"
    own = part(x.detach(), kind, tp).requires_grad_()
    result = (tp.log_softmax if logarithm else tp.softmax)(own, dim)
    result.backward(part(upstream, kind, tp))
    assert own.grad is not None and x.grad is not None
    return error(result.detach(), expected.detach(), kind, tp), error(own.grad, x.grad, kind, tp)
