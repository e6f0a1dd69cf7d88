"""The call that a compute probe times. Operands change from call to call, so that they are not found in a cache that training
would not find them in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .clock import Call
from .settings import Probe

_ROTATION_BYTES = {"cpu": 48 << 20, "cuda": 512 << 20}
"""What the operands of a probe take together, where one call needs less: more than the last cache holds."""
_SETS = 64
LAUNCHES = 100
"""Kernels of one call of a ``launch`` probe."""
_COLUMNS = {"cross_entropy_loss": 1024}
_WIDTH = 256
_HEADS, _HEAD = 16, 128


def prepare(probe: Probe, device: torch.device) -> tuple[Call, int]:
    """(a call, how many times it does what ``probe`` names)."""
    if probe.subject == "gemm":
        return _products(probe.sizes, getattr(torch, probe.dtype), device), 3
    if probe.subject == "launch":
        return _captured_launches(device) if device.type == "cuda" else _launches(device), LAUNCHES
    return _single(probe, device), 1


def _single(probe: Probe, device: torch.device) -> Call:
    dtype: torch.dtype = getattr(torch, probe.dtype)
    if probe.subject in ("attention", "attention_backward"):
        return _attention(probe.sizes, dtype, device, backward=probe.subject == "attention_backward")
    if probe.subject == "stream":
        return _stream(probe.sizes[0], dtype, device)
    if probe.subject == "irregular":
        return _irregular(probe.sizes[0], dtype, device)
    if probe.subject == "function":
        return _function(probe.name, probe.sizes[0], dtype, device)
    raise ValueError(f"{probe.subject} is no compute probe")


def _sets(bytes_of_one: float, device: torch.device) -> int:
    return max(1, min(_SETS, math.ceil(_ROTATION_BYTES[device.type] / bytes_of_one)))


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values where they decide how much power, and so what clock, a product gets (GPUs); a constant is made quicker."""
    if device.type == "cuda":
        return torch.randn(shape, device=device).to(dtype)
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _in_turns(calls: Sequence[Call]) -> Call:
    turns = cycle(calls)
    return lambda: next(turns)()


def _products(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Call:
    """The three products of a linear layer: forward, input gradient, weight gradient; as many FLOPs each. One call is all
    three."""
    m, n, k = sizes
    size = dtype.itemsize * (m * k + n * k + m * n)

    def one() -> Sequence[Call]:
        x, weight, gradient = (_filled(shape, dtype, device) for shape in ((m, k), (n, k), (m, n)))
        return (
            lambda: F.linear(x, weight), lambda: torch.mm(gradient, weight), lambda: torch.mm(gradient.t(), x),
        )

    trios = [one() for _ in range(_sets(size, device))]
    turns = cycle(trios)

    def three() -> None:
        for call in next(turns):
            call()

    return three


def _attention(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, *, backward: bool) -> Call:
    batch, heads, length, head_dim, causal = sizes
    size = 4 * dtype.itemsize * batch * heads * length * head_dim

    def one() -> Call:
        query, key, value = (
            _filled((batch, heads, length, head_dim), dtype, device).requires_grad_(backward) for _ in range(3)
        )

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=bool(causal))

        return _backward_of(forward(), (query, key, value)) if backward else forward

    return _in_turns([one() for _ in range(_sets(size, device))])


def _stream(elements: int, dtype: torch.dtype, device: torch.device) -> Call:
    def one() -> Call:
        x, y = torch.ones(elements, dtype=dtype, device=device), torch.ones(elements, dtype=dtype, device=device)
        return lambda: torch.add(x, y)

    return _in_turns([one() for _ in range(_sets(2 * dtype.itemsize * elements, device))])


def _irregular(elements: int, dtype: torch.dtype, device: torch.device) -> Call:
    """What rotary position embedding does to queries: [batch, heads, tokens, 128], of which heads lie inside tokens."""
    def one() -> Call:
        x = torch.ones(2, elements // (2 * _HEADS * _HEAD), _HEADS, _HEAD, dtype=dtype, device=device).transpose(1, 2)
        table = torch.ones(x.shape[-2:], dtype=dtype, device=device)
        return lambda: torch.mul(x, table)

    return _in_turns([one() for _ in range(_sets(2 * dtype.itemsize * elements, device))])


def _launches(device: torch.device) -> Call:
    """Half of the kernels run forward, half in autograd's backward pass: the host computes what it launches."""
    x = torch.ones(64, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(LAUNCHES // 2):
            y = y * 0.5
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
        x.grad = None

    return chain


def _captured_launches(device: torch.device) -> Call:
    """Kernels of a captured graph: the gap between two kernels, without the host that runs ahead of them."""
    x = torch.ones(64, device=device)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        x.mul_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            x.mul_(1.0)
    return graph.replay


_FORWARD: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x: F.gelu(x), "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": lambda x: F.silu(x),
    "tanh": lambda x: x.tanh(), "exp": lambda x: x.exp(), "sigmoid": lambda x: x.sigmoid(), "sum": lambda x: x.sum(0),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
    "rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight),
    "cross_entropy_loss": lambda x, target: F.cross_entropy(x, target, reduction="sum"),
}  # fmt: skip


def _function(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Call:
    base, backward_pass = name.removesuffix("_backward"), name.endswith("_backward")
    columns = _COLUMNS.get(base, _WIDTH)

    def one() -> Call:
        x = _filled((elements // columns, columns), dtype, device).requires_grad_(backward_pass)
        others: list[Tensor] = []
        if base in ("layer_norm", "rms_norm"):
            others = [
                torch.ones(columns, dtype=dtype, device=device, requires_grad=backward_pass)
                for _ in range(2 if base == "layer_norm" else 1)
            ]
        if base == "cross_entropy_loss":
            others = [torch.randint(columns, (elements // columns,), device=device)]
        if not backward_pass:
            return lambda: _FORWARD[base](x, *others)
        inputs = [tensor for tensor in (x, *others) if tensor.requires_grad]
        return _backward_of(_FORWARD[base](x, *others), inputs)

    return _in_turns([one() for _ in range(_sets(4 * dtype.itemsize * elements, device))])


def _backward_of(output: Tensor, inputs: Sequence[Tensor]) -> Call:
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def synchronise(device: torch.device) -> None:
    """Wait for the device and give back what a probe held."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def hooks(mesh: Any, device: torch.device) -> tuple[Call, Call, int]:
    """(wrapped, plain, passes): forward and backward of blocks of many small parameters, with FSDP2's hooks and without."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(64, device=device)) for _ in range(_PARAMETERS)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x * weight
            return x

    def chain(wrapped: bool) -> Call:
        blocks = [Small() for _ in range(_BLOCKS)]
        stage = nn.Sequential(*blocks)
        if wrapped:
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
            fully_shard(stage, mesh=mesh, reshard_after_forward=False)
            for module in (stage, *blocks):
                module.set_requires_gradient_sync(False)  # type: ignore[operator]
                module.set_reshard_after_backward(False)  # type: ignore[operator]
        x = torch.ones(64, device=device)

        def call() -> None:
            stage(x).sum().backward()

        return call

    return chain(True), chain(False), 2 * _BLOCKS


_BLOCKS = 4
_PARAMETERS = 12
"""Of a transformer block with biases."""
