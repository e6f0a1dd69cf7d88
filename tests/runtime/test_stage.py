"""What a stage of the pipeline answers for its inputs."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from runtime.stage import ZeroStage
from runtime.zero import Microbatching


def stage_of(module: nn.Module, sent_back: list[bool]) -> ZeroStage:
    """A stage in the middle of its only micro-batch, without its ranks. ``sent_back``: which inputs get a gradient."""
    stage = ZeroStage.__new__(ZeroStage)
    stage.submod, stage.control, stage.split_backward = module, Mock(spec=Microbatching), False
    stage._sent_back, stage._microbatches, stage._finished = sent_back, 1, 0
    return stage


@pytest.mark.parametrize("kind", ["full", "input"])
def test_an_input_that_is_only_read_detached_is_answered_with_zeros(kind: str) -> None:
    """The stage before waits for it. A batch's input and one that asks for nothing are answered with None."""
    module = nn.Linear(3, 3, bias=False).double()
    read, passed, detached, frozen, batch = (torch.randn(2, 3, dtype=torch.float64) for _ in range(5))
    for value in (read, passed, detached):
        value.requires_grad_()
    outputs = (module(read) + detached.detach() + frozen + batch, passed)
    gradients = (torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64))
    made, _ = stage_of(module, [True, True, True, False]).backward_maybe_with_nosync(
        kind, {"stage_output": outputs, "output_grads": gradients, "input_values": (read, passed, detached, frozen, batch)},
    )
    expected = (gradients[0] @ module.weight.detach(), gradients[1], torch.zeros(2, 3, dtype=torch.float64))
    for found, want in zip(made[:3], expected, strict=True):
        assert found is not None and torch.equal(found, want)
    assert made[3:] == (None, None)
