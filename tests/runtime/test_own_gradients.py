"""Gradients that later micro-batches are added to in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from runtime.own_gradients import own_gradients

SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they are": lambda a, b: a + b,
    "in one more dim": lambda a, b: a[None] + b[None],
    "one of them": lambda a, b: a[None] + b,
    "in a row": lambda a, b: a.view(-1) + b.view(12),
    "turned": lambda a, b: a.t() + b.t(),
    "side by side": lambda a, b: torch.cat([a[None], b[None]]),
    "over all": lambda a, b: a.sum() * b.sum(),
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_what_is_added_to_one_changes_no_other(add: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = (nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
    expected = torch.autograd.grad(add(a, b).square().sum(), (a, b))
    for index in range(3):
        add(a, b).square().sum().backward()
        if not index:
            own_gradients((a, b))
    for parameter, gradient in zip((a, b), expected, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, 3 * gradient, rtol=1e-12)


def test_memory_that_is_written_again_or_on_its_way_is_none_of_a_gradient() -> None:
    """A stage that is ``x + place[None]`` for one sample: what comes in is the gradient of both, and goes out."""
    x, place = torch.randn(1, 3, 4, requires_grad=True), nn.Parameter(torch.randn(3, 4))
    came = torch.ones(1, 3, 4)
    torch.autograd.backward([x + place[None]], [came])
    assert place.grad is not None and place.grad.data_ptr() in (came.data_ptr(), x.grad.data_ptr())  # type: ignore[union-attr]
    own_gradients((place,), (came, x.grad, None))
    came.fill_(0)
    x.grad.fill_(0)  # type: ignore[union-attr]
    assert torch.equal(place.grad, torch.ones(3, 4))


def test_parts_of_one_storage_stay_where_they_are() -> None:
    a, b = (nn.Parameter(torch.randn(2, 3)) for _ in range(2))
    (torch.cat([a, b]) * torch.ones(4, 3)).sum().backward()
    before = [parameter.grad for parameter in (a, b)]
    own_gradients((a, b))
    assert all(parameter.grad is gradient for parameter, gradient in zip((a, b), before, strict=True))
