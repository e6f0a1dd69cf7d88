"""The input part of a split backward pass leaves out what has no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.input_part import backward_inputs
from runtime.weight_part import backward_weights


def values(count: int) -> list[Tensor]:
    return [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def test_outputs_without_a_gradient_are_left_out() -> None:
    """Both parts together are the whole pass; an input that no gradient reaches has none, one that asks for none neither."""
    module, (x, detached, frozen, gradient) = nn.Linear(3, 3).double(), values(4)
    frozen.requires_grad_(False)
    gradient = gradient.detach()

    def forward() -> tuple[Tensor, Tensor]:
        settled = module(detached.detach())
        return settled.detach(), module(x) * frozen + settled

    expected = torch.autograd.grad(forward()[1], [x, *module.parameters()], gradient)
    outputs = forward()
    made, groups = backward_inputs(outputs, (None, gradient), [x, detached, frozen], module.parameters())
    assert made[0] is not None and torch.equal(made[0], expected[0]) and made[1:] == (None, None)
    assert x.grad is None, "the next micro-batch's gradient of the same buffer would be added to it"
    assert not any(output.requires_grad for output in outputs), "the graph behind the outputs is kept"
    backward_weights(module, groups)
    for parameter, want in zip(module.parameters(), expected[1:], strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, want, rtol=1e-14)


@pytest.mark.parametrize("wanted", [False, True])
def test_outputs_that_all_have_none_make_none(wanted: bool) -> None:
    x = torch.randn(2, 3).requires_grad_(wanted)
    made, groups = backward_inputs([x.detach().sin()], [None], [x], nn.Linear(3, 3).parameters())
    assert made == (None,) and not groups


def test_a_loss_begins_with_one() -> None:
    module, (x,) = nn.Linear(3, 3).double(), values(1)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    made, groups = backward_inputs([module(x).square().sum()], None, [x], module.parameters())
    assert made[0] is not None and torch.equal(made[0], expected[0])
    backward_weights(module, groups)
    for parameter, want in zip(module.parameters(), expected[1:], strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, want)
