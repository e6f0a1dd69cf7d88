"""FLOPs of both passes against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from planner.ops.work import backward_work, work
from planner.trace.interpret import execute
from tests.rules.nodes import Call, call, real, type_of


def weights(gates: int, width: int, hidden: int) -> list[Tensor]:
    return [real(gates * hidden, width), real(gates * hidden, hidden), real(gates * hidden), real(gates * hidden)]


PRODUCTS = {
    "linear": lambda: call("linear", real(2, 5, 6), real(8, 6)),
    "linear with bias": lambda: call("linear", real(2, 5, 6), real(8, 6), real(8)),
    "mm": lambda: call("mm", real(5, 6), real(6, 8)),
    "bmm": lambda: call("bmm", real(3, 5, 6), real(3, 6, 8)),
    "matmul": lambda: call("matmul", real(2, 3, 5, 6), real(2, 3, 6, 8)),
    "matmul of rows": lambda: call("matmul", real(2, 3, 5, 6), real(6, 8)),
    "addmm": lambda: call("addmm", real(8), real(5, 6), real(6, 8)),
    "baddbmm": lambda: call("baddbmm", real(3, 5, 8), real(3, 5, 6), real(3, 6, 8)),
    "conv1d": lambda: call("conv1d", real(2, 4, 9), real(6, 4, 3), padding=[1]),
    "conv2d": lambda: call("conv2d", real(2, 4, 9, 8), real(6, 4, 3, 3), stride=[2, 2]),
    "conv_transpose1d": lambda: call("conv_transpose1d", real(2, 4, 9), real(4, 6, 3)),
    "conv_transpose2d": lambda: call("conv_transpose2d.input", real(2, 4, 5, 6), real(4, 6, 2, 2), stride=[2, 2]),
    "gru": lambda: call("gru.input", real(2, 7, 5), real(1, 2, 6), weights(3, 5, 6), True, 1, 0.0, True, False, True),
    **{equation: (lambda equation=equation, left=left, right=right: call("einsum", equation, [real(*left), real(*right)]))
       for equation, left, right in (
           ("btd,dk->btk", (2, 5, 6), (6, 8)), ("bthk,bshk->bhts", (2, 5, 3, 4), (2, 7, 3, 4)),
           ("bhts,bshk->bthk", (2, 3, 5, 7), (2, 7, 3, 4)), ("ij,kj->ki", (5, 6), (8, 6)),
           ("bhtk,hkd->btd", (2, 3, 5, 4), (3, 4, 6)), ("bi,bj->bij", (2, 5), (2, 6)), ("i,i->", (5,), (5,)),
       )},
}


def counted(product: Call) -> tuple[float, float]:
    """By the planner, of both passes."""
    types = [type_of(operand) for operand in product.operands]
    needs = [operand.requires_grad for operand in product.operands]
    forward = work(product.node, types, product.node.types, 1)
    own = [at > 0 for at in range(len(needs))]
    backward = backward_work(product.node, types, product.node.types, 1, needs, own, forward=forward)
    return forward.flops, sum(part.flops for part in backward)


def by_torch(product: Call) -> tuple[float, float]:
    with FlopCounterMode(display=False) as forward:
        result = execute(product.node, dict(zip(product.node.operands, product.operands, strict=True)), 1)
    made = result if isinstance(result, Tensor) else result[0]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(made, [operand for operand in product.operands if operand.requires_grad], torch.ones_like(made))
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    torch.manual_seed(0)
    product = PRODUCTS[name]()
    assert counted(product) == by_torch(product)


def test_grouped_product() -> None:
    """Every row is multiplied once, whichever group it is in."""
    rows, groups = torch.randn(40, 8), torch.randn(4, 8, 12)
    product = call("_grouped_mm", rows.requires_grad_(), groups.requires_grad_(), offs=torch.tensor([1, 1, 30, 40]).int())
    assert counted(product) == (2 * 40 * 8 * 12, 4 * 40 * 8 * 12)
