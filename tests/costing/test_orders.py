"""How gradients lie that an operation makes of an image whose channels lie innermost, against the strides of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from planner.costing.forward import Emitted
from planner.costing.local import localise
from planner.costing.passes import BlockPasses
from planner.ir.body import Body, BodyValue, Node
from planner.ir.types import Argument, Ref, TensorType
from planner.trace.interpret import execute

ROWS = (2, 6, 6, 8)
CASES: dict[str, tuple[str, str, dict[str, Argument]]] = {
    "softmax": ("softmax.int", "self", {"dim": -1}),
    "log_softmax": ("log_softmax.int", "self", {"dim": 1}),
    "mean": ("mean.dim", "self", {"dim": (2, 3)}),
    "sum": ("sum.dim_IntList", "self", {"dim": (1,), "keepdim": True}),
    "repeated": ("repeat_interleave.self_int", "self", {"repeats": 2, "dim": 1}),
    "patches": ("im2col", "self", {"kernel_size": (2, 2), "dilation": (1, 1), "padding": (0, 0), "stride": (1, 1)}),
    "shuffled": ("channel_shuffle", "self", {"groups": 2}),
    "reflected": ("reflection_pad2d", "self", {"padding": (1, 1, 1, 1)}),
    "clamp": ("clamp", "self", {"min": 0.0}),
    "variance": ("var.correction", "self", {"dim": (1,)}),
    "pixels": ("pixel_shuffle", "self", {"upscale_factor": 2}),
    "merged": ("reshape", "self", {"shape": (2, 8, 36)}),
    "cut": ("reshape", "self", {"shape": (2, 2, 4, 6, 6)}),
    "flat": ("reshape", "self", {"shape": (2, 288)}),
    "layer_norm": ("layer_norm", "input", {"normalized_shape": (6,)}),
    "cumsum": ("cumsum", "self", {"dim": 1}),
    "narrow": ("slice.Tensor", "self", {"dim": 1, "start": 1, "end": 5}),
    "select": ("select.int", "self", {"dim": 1, "index": 2}),
    "tril": ("tril", "self", {}),
    "roll": ("roll", "self", {"shifts": (1,), "dims": (1,)}),
    "flip": ("flip", "self", {"dims": (1,)}),
    "pad": ("constant_pad_nd", "self", {"pad": (1, 1)}),
    "gelu": ("gelu", "self", {}),
    "average": ("avg_pool2d", "self", {"kernel_size": (2, 2)}),
    "largest": ("amax", "self", {"dim": (1,)}),
    "groups": ("group_norm", "input", {"num_groups": 4}),
    "length": ("linalg_vector_norm", "self", {"dim": (1,)}),
    "nearest": ("upsample_nearest2d", "self", {"output_size": (9, 9)}),
    "linear": ("upsample_bilinear2d", "self", {"output_size": (9, 9), "align_corners": False}),
    "cubic": ("upsample_bicubic2d", "self", {"output_size": (9, 9), "align_corners": False}),
    "smooth": ("_upsample_bicubic2d_aa", "self", {"output_size": (9, 9), "align_corners": False}),
}


@pytest.mark.parametrize(("op", "operand", "arguments"), CASES.values(), ids=CASES)
def test_a_gradient_lies_as_torch_makes_it(op: str, operand: str, arguments: dict[str, Argument]) -> None:
    turned = Node("image", "permute", (("self", Ref("x")), ("dims", (0, 3, 1, 2))), (TensorType((2, 8, 6, 6), "float32"),),
                  differentiable=True)
    node = Node("out", op, ((operand, Ref("image")), *arguments.items()), ())
    with FakeTensorMode():
        image = torch.randn(ROWS, requires_grad=True).exp().permute(0, 3, 1, 2)
        made = execute(node, {"image": image}, 1)
        (gradient,) = torch.autograd.grad(made, image, torch.empty_like(made))
    node = Node("out", op, node.arguments, (TensorType(tuple(made.shape), "float32"),), differentiable=True)
    body = Body("Made", (BodyValue("x", TensorType(ROWS, "float32"), True),), (), (), (turned, node), ("out",))
    (leaving,) = BlockPasses(Emitted(localise(body, None, 1)), "none").backward("full").leaving
    assert leaving.order.straight == gradient.permute(0, 2, 3, 1).is_contiguous()


def test_a_part_is_written_into_a_copy_of_all_that_it_lies_in() -> None:
    """Of 15 rows of 16, in both passes: the result lies in a storage of 16, and so does the gradient of such a part's."""
    whole, rows, patch = torch.randn(2, 16, 8), torch.randn(2, 15, 8, requires_grad=True), torch.randn(2, 15, 4)
    written = torch.slice_scatter(rows, patch, 2, 0, 4)
    (gradient,) = torch.autograd.grad(written, rows, whole[:, 1:])
    types = [TensorType(tuple(value.shape), "float32") for value in (whole, rows, patch)]
    inputs = tuple(map(BodyValue, ("whole", "rows", "patch"), types, (False, True, False)))
    nodes = (
        Node("part", "slice.Tensor", (("self", Ref("whole")), *_cut(1, 1, 16)), (types[1],)),
        Node("other", "slice_scatter", (("self", Ref("part")), ("src", Ref("patch")), *_cut(2, 0, 4)), (types[1],)),
        Node("written", "slice_scatter", (("self", Ref("rows")), ("src", Ref("patch")), *_cut(2, 0, 4)), (types[1],),
             differentiable=True),
        Node("out", "slice_scatter", (("self", Ref("whole")), ("src", Ref("written")), *_cut(1, 1, 16)), (types[0],),
             differentiable=True),
    )
    local = localise(Body("Made", inputs, (), (), nodes, ("out", "other")), None, 1)
    (leaving,) = BlockPasses(Emitted(local), "none").backward("full").leaving
    assert local.storage_bytes("other") == torch.slice_scatter(whole[:, 1:], patch, 2, 0, 4).untyped_storage().nbytes()
    assert leaving.size == gradient.untyped_storage().nbytes()


def _cut(dim: int, start: int, end: int) -> tuple[tuple[str, Argument], ...]:
    return ("dim", dim), ("start", start), ("end", end), ("step", 1)
