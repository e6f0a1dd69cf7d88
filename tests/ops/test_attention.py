"""Which attention a fused kernel runs: what the planner says of operands, against the kernels themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from planner.ir.body import Node
from planner.ops.attention import fused_attention
from planner.ops.layout import Layout
from runtime.rehearsal_kernels import accelerator_kernels


@dataclass(frozen=True)
class Call:
    """``turned``: those of query, key and value whose last two dims lie the other way round."""

    dtype: str = "bfloat16"
    heads: tuple[int, int, int] = (4, 4, 4)
    batches: tuple[int, int, int] = (2, 2, 2)
    lengths: tuple[int, int] = (16, 16)
    head: int = 16
    turned: str = ""
    mask: tuple[int, ...] | None = None
    mask_stride: int = 1
    causal: bool = False
    grouped: bool = False
    dropout: float = 0.0

    def operands(self) -> list[torch.Tensor]:
        dtype, made = getattr(torch, self.dtype), []
        for name, heads, batch in zip("qkv", self.heads, self.batches, strict=True):
            tokens = self.lengths[0 if name == "q" else 1]
            turned = name in self.turned
            sizes = (self.head, tokens) if turned else (tokens, self.head)
            value = torch.zeros(batch, heads, *sizes, dtype=dtype, requires_grad=True)
            made.append(value.transpose(-1, -2) if turned else value)
        if self.mask is not None:
            made.append(torch.zeros(*self.mask, self.mask_stride, dtype=dtype)[..., 0])
        return made

    def said(self, *, accelerator: bool) -> bool:
        arguments = (("dropout_p", self.dropout), ("is_causal", self.causal), ("enable_gqa", self.grouped))
        node = Node("o", "scaled_dot_product_attention" + (".fused" if accelerator else ""), arguments, ())
        return fused_attention(node, [Layout(tuple(x.shape), x.stride(), self.dtype) for x in self.operands()])

    def runs(self) -> bool:
        made = F.scaled_dot_product_attention(
            *self.operands(), dropout_p=self.dropout, is_causal=self.causal, enable_gqa=self.grouped,
        )
        return "Flash" in type(made.grad_fn).__name__


CALLS = [
    Call(), Call("float32"), Call("float64"), Call(turned="q"), Call(turned="k"), Call(turned="v", dtype="float32"),
    Call(dropout=0.1), Call("float32", dropout=0.1), Call("float64", dropout=0.1), Call(turned="k", dropout=0.1),
    Call(heads=(4, 2, 2), grouped=True), Call("float32", heads=(4, 2, 2), grouped=True), Call(heads=(4, 1, 1)),
    Call(heads=(4, 2, 4), grouped=True), Call(grouped=True), Call(batches=(2, 1, 1)),
    Call(lengths=(8, 16)), Call(lengths=(8, 16), causal=True), Call("float32", lengths=(8, 16), causal=True),
    Call(lengths=(8, 16), causal=True, head=6), Call(head=6), Call("float32", head=6), Call("float32", head=6, causal=True),
    Call(head=264), Call(head=260), Call(head=6, dropout=0.1),
    Call(mask=(16, 16)), Call(mask=(16, 16), head=6), Call(mask=(1, 1, 16, 16)), Call(mask=(2, 4, 16, 16)),
    Call(mask=(16, 16), mask_stride=2), Call(mask=(1, 16)),
    Call(mask=(4, 16, 16)), Call(mask=(1, 16, 16)), Call("float32", mask=(4, 16, 16)), Call("float64", mask=(4, 16, 16)),
    Call(mask=(4, 16, 16), mask_stride=2), Call(mask=(4, 16, 16), dropout=0.1),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_cpus_kernel(call: Call) -> None:
    assert call.said(accelerator=False) == call.runs()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_rehearsal_with_an_accelerators_kernels(call: Call) -> None:
    with accelerator_kernels():
        assert call.said(accelerator=True) == call.runs()


def test_what_an_accelerators_kernels_take() -> None:
    """As CUDA's conditions are written: they take other operands than the CPU's."""
    call = Call()
    taken = {
        "double precision": Call("float64"), "a causal mask that is not square": Call(lengths=(8, 16), causal=True, head=6),
        "half precision under a mask, heads of 12 bytes": Call(mask=(16, 16), head=6),
        "float32, heads of 24 bytes": Call("float32", head=6),
        "float32, fewer heads": Call("float32", heads=(4, 2, 2), grouped=True),
        "a mask that lies otherwise": Call(mask=(16, 16), mask_stride=2),
    }
    assert not [name for name, one in taken.items() if one.said(accelerator=True)]
    assert all(one.said(accelerator=False) for one in taken.values())
    three = Call(mask=(4, 16, 16))
    assert three.said(accelerator=True) and not three.said(accelerator=False)
    assert call.said(accelerator=True) and replace(call, dropout=0.1).said(accelerator=True)
