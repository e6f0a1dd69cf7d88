"""What is said to run again under full recomputation is what torch's checkpoint runs again, kernel by kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from planner.costing.local import localise
from planner.costing.repeated import computed_nodes, repeated_nodes
from planner.trace import load_model
from tests.costing.test_saved_bytes import traced

PRODUCTS = ("aten::mm", "aten::addmm")
KERNELS = {
    "linear": PRODUCTS, "scaled_dot_product_attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "gelu": ("aten::gelu",), "silu": ("aten::silu",),
}  # fmt: skip


class _Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def backward_calls(block: nn.Module, arguments: tuple[Any, ...], *, again: bool) -> Counter[str]:
    x = torch.randn(2, 64, 128, requires_grad=True)
    made = checkpoint(block, x, *arguments, use_reentrant=False) if again else block(x, *arguments)
    with _Calls() as calls:
        made.sum().backward()
    return calls.counted


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_last_product_does_not_run_again(model: str) -> None:
    body = max(traced(model, "float32").bodies, key=lambda body: len(body.nodes))
    local = localise(body, None, 2)
    again = computed_nodes(local, "full")
    module = load_model(f"examples/{model}.py:{model}", {"layers": 1}, 64).build()
    block, arguments = (module.blocks[0], ()) if model == "gpt" else (module.layers[0], module.rotary(64))
    more = backward_calls(block, arguments, again=True)
    more.subtract(backward_calls(block, arguments, again=False))
    for base, names in KERNELS.items():
        expected = sum(node.base == base and node.name in again for node in body.nodes)
        assert sum(more[name] for name in names) == expected, base
    whole = repeated_nodes(local, "full")
    (last,) = {node.name for node in body.nodes} & (whole - again)
    assert body.by_name[last].base == "linear"
