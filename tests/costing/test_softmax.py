"""Softmax along a split dim holds what the runtime's own function does, on fake tensors and a fake group of two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.costing.forward import Emitted
from planner.costing.local import localise
from planner.costing.passes import BlockPasses
from planner.costing.storages import Arrival
from planner.ir.body import Body, BodyValue, Node
from planner.ir.placement import BodyPlacement, NodePlacement, OpStrategy, Transfer, shard
from planner.ir.types import Ref, TensorType
from runtime.collectives import TensorAxis
from runtime.rehearsal import Recorder
from runtime.rehearsal_memory import StorageLog
from runtime.rehearsal_traffic import Traffic

WHOLE, DEGREE = (4, 32, 8), 2


@pytest.fixture
def axis() -> Iterator[TensorAxis]:
    dist.init_process_group("fake", rank=0, world_size=DEGREE, store=FakeStore())
    yield TensorAxis(dist.group.WORLD, 0, DEGREE)
    dist.destroy_process_group()


def predicted(base: str, dim: int, dtype: str) -> tuple[int, int]:
    whole = TensorType(WHOLE, dtype)  # type: ignore[arg-type]
    node = Node("out", base, (("self", Ref("x")), ("dim", dim), ("dtype", None)), (whole,), differentiable=True)
    body = Body("Case", (BodyValue("x", whole, True),), (), (), (node,), ("out",))
    row = (Transfer("all_reduce", 1),)
    strategy = OpStrategy("inner", (shard(dim),), (shard(dim),), row, row)
    placement = BodyPlacement("Case", DEGREE, (shard(dim),), (), (NodePlacement("out", strategy),), (shard(dim),))
    passes = BlockPasses(Emitted(localise(body, placement, 1)), "none")
    arrived = tuple(Arrival(at, size, held=True) if size else None for at, size in enumerate(passes.gradient_bytes))
    return sum(passes.forward.peak), sum(passes.backward(arrivals=arrived).peak)


def held(axis: TensorAxis, base: str, dim: int, dtype: str) -> tuple[int, int]:
    """The most in the forward pass, its result included, and in the backward pass."""
    log, shape = StorageLog(), [extent // DEGREE if at == dim else extent for at, extent in enumerate(WHOLE)]
    with FakeTensorMode(), Recorder(Traffic({"tensor": DEGREE}), log):
        x = torch.empty(shape, dtype=getattr(torch, dtype), requires_grad=True)
        log.begin()
        before = sum(log.peak().values())
        result = axis.softmax(x, dim) if base == "softmax" else axis.log_softmax(x, dim)
        forward = sum(log.peak().values()) - before
        arrived = torch.empty_like(result)
        log.begin()
        before = sum(log.peak().values())
        gradients = torch.autograd.grad(result, x, arrived)
        backward = sum(log.peak().values()) - before
        del gradients
    return forward, backward


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("base", ["softmax", "log_softmax"])
def test_both_passes_hold_what_they_do(axis: TensorAxis, base: str, dim: int, dtype: str) -> None:
    assert predicted(base, dim, dtype) == held(axis, base, dim, dtype)
