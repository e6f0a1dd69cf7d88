"""The weight part of a split backward pass goes over nothing a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from runtime.input_part import backward_inputs
from runtime.undefined import or_none
from runtime.weight_part import backward_weights


class Counted(Function):
    """What passes unchanged; ``calls`` grows with every gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: list[int]) -> Tensor:
        ctx.calls = calls
        return x.view_as(x)

    @staticmethod
    @or_none
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.calls[0] += 1
        return gradient, None


class Reading(nn.Module):
    """One norm and one scale for three products, the last of which the second leads to; a slope that is read as it is and
    through what is made of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.randn(4))
        self.products = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.slope = nn.Parameter(torch.randn(1))
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        steep = self.slope.exp()
        for product in self.products:
            x = x + steep * self.scale * product(Counted.apply(self.norm(x), self.calls))
        return x * self.slope


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_the_whole_pass_s_and_nothing_is_called_twice(seed: int) -> None:
    """Also where torch has a parameter in two groups, which it has by the order of a set of nodes."""
    torch.manual_seed(seed)
    module, x = Reading().double(), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    made = module(x)
    module.calls[0] = 0
    (incoming,), groups = backward_inputs([made], [2 * made.detach()], [x], module.parameters())
    assert incoming is not None and torch.allclose(incoming, expected[0])
    assert module.calls == [3] and any(len(group["intermediates"]) > 1 for group in groups)
    backward_weights(module, groups)
    assert module.calls == [3], "gradients went over what lies between two reads of a parameter again"
    for parameter, gradient in zip(module.parameters(), expected[1:], strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradient)


def test_a_node_that_leads_to_no_other_is_left_alone() -> None:
    """Two reads side by side: both gradients are one sum."""
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(3, requires_grad=True)
    module = nn.Module()
    module.register_parameter("scale", scale)
    made = scale * x.sin() + scale * x.cos()
    (expected,) = torch.autograd.grad(made.sum(), [scale], retain_graph=True)
    _, groups = backward_inputs([made], [torch.ones(3)], [x], module.parameters())
    backward_weights(module, groups)
    assert scale.grad is not None and torch.equal(scale.grad, expected)


class Both(Function):
    """Two values as they are, out of one node, as FSDP hands a block's inputs on."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first.view_as(first), second.view_as(second)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first, second


def test_a_gradient_stays_with_its_output() -> None:
    """A parameter that joins the inputs' path as a node's second output: torch 2.11 gave it what came for the first too."""
    scale, x = nn.Parameter(torch.randn(3)), torch.randn(3, requires_grad=True)
    module = nn.Module()
    module.register_parameter("scale", scale)
    first, second = Both.apply(x, scale.exp())
    _, groups = backward_inputs([first.sin(), second.cos()], [torch.ones(3), torch.ones(3)], [x], module.parameters())
    backward_weights(module, groups)
    assert scale.grad is not None and torch.allclose(scale.grad, -scale.exp().sin() * scale.exp())


class Adding(nn.Module):
    """Parameters whose gradients lie in one memory: a sum's are one tensor, or views of one; a sum over elements' lies over
    itself; one as large as what it is added to has what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.deep, self.lone, self.place = (nn.Parameter(torch.randn(size)) for size in ((4, 4, 1), (4,), (1, 2, 4)))
        self.left, self.right = (nn.Parameter(torch.randn(2, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh((x + self.place) @ (self.first + self.second)) * self.lone.sum()
        x = x @ (self.first[None] + self.deep.squeeze(-1)[None]) @ (self.third.t() - self.second)
        return x @ torch.cat([self.left, self.right])


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_gradient_has_memory_of_its_own(microbatches: int) -> None:
    """Later micro-batches' gradients are added to the first one's in place; what came in lies in buffers that are written
    again."""
    torch.manual_seed(0)
    module = Adding().double()
    parameters = list(module.parameters())
    xs = [torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(microbatches)]
    expected = torch.autograd.grad(torch.stack([module(x).square().sum() for x in xs]).sum(), parameters)
    buffer = torch.empty(1, 2, 4, dtype=torch.float64)
    for x in xs:
        made = module(x)
        buffer.copy_(2 * made.detach())
        _, groups = backward_inputs([made], [buffer], [x], parameters)
        backward_weights(module, groups)
        buffer.fill_(float("nan"))
    for (name, parameter), gradient in zip(module.named_parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradient, rtol=1e-12, atol=1e-12), name


def test_a_gradient_that_is_what_comes_in_is_copied() -> None:
    """It may lie in a receive buffer."""
    place, x = nn.Parameter(torch.randn(1, 3)), torch.randn(1, 3, requires_grad=True)
    module = nn.ParameterList([place])
    came = torch.randn(1, 3)
    expected = came.clone()
    _, groups = backward_inputs([x + place], [came], [x], module.parameters())
    backward_weights(module, groups)
    came.fill_(0)
    assert place.grad is not None and torch.equal(place.grad, expected)


def test_parts_of_one_gradient_side_by_side_are_not_copied() -> None:
    left, right = (nn.Parameter(torch.randn(2, 3)) for _ in range(2))
    module, x = nn.ParameterList([left, right]), torch.randn(5, 4, requires_grad=True)
    _, groups = backward_inputs([x @ torch.cat([left, right])], [torch.ones(5, 3)], [x], module.parameters())
    backward_weights(module, groups)
    assert left.grad is not None and right.grad is not None
    assert left.grad.untyped_storage()._cdata == right.grad.untyped_storage()._cdata
