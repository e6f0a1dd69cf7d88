"""The tensors that the memory model counts are the tensors that FSDP2 holds, looked at in a fake group of four."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cost_models.memory import Precision, state_bytes

GROUP = 4
ELEMENTS = 64 * 64


@pytest.fixture
def group_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GROUP)
    yield
    dist.destroy_process_group()


def wrapped(zero: int, precision: Precision) -> Any:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh("cpu", (GROUP,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    if zero == 0:
        return replicate(model, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)


def held(model: Any) -> dict[str, int]:
    """Bytes by role that the only parameter of ``model`` holds now."""
    state = model._get_fsdp_state() if hasattr(model, "_get_fsdp_state") else None
    assert state is not None
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    (parameter,) = groups[0].fsdp_params
    unsharded = getattr(parameter, "_unsharded_param", None)
    whole = [parameter.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
    shard = parameter.sharded_param.grad

    def size(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.untyped_storage().nbytes()

    return {
        "parameters": size(parameter._sharded_param_data),
        "gathered": sum(size(output) for output in parameter.all_gather_outputs),
        "gradients": sum(map(size, whole)) + size(None if shard is None else shard.to_local()),
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.usefixtures("group_of_four")
def test_what_fsdp2_holds_is_what_is_counted(zero: int, precision: Precision) -> None:
    model = wrapped(zero, precision)
    expected = state_bytes(ELEMENTS, precision, zero, GROUP, accumulates=False)
    assert held(model)["parameters"] == expected.parameters

    whole = model(torch.ones(2, 64)).sum()
    assert held(model)["gathered"] == (0 if zero == 3 else expected.gathered)
    whole.backward()
    after = held(model)
    assert after["gathered"] == 0
    assert after["gradients"] == expected.gradients

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    (moments,) = optimizer.state.values()
    held_moments = sum(moments[name].to_local().nbytes for name in ("exp_avg", "exp_avg_sq"))
    assert held_moments == expected.optimizer


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.usefixtures("group_of_four")
def test_unreduced_gradients_are_whole(zero: int, precision: Precision) -> None:
    model = wrapped(zero, precision)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        expected = state_bytes(ELEMENTS, precision, zero, GROUP, accumulates=True)
        assert held(model) == {
            "parameters": expected.parameters,
            "gathered": expected.gathered,
            "gradients": expected.gradients,
        }
