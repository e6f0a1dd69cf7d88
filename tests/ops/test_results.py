"""Where results lie, by formula, against the strides of what torch makes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.types import Argument, Ref, TensorType
from planner.ops.layout import Layout
from planner.ops.results import result_layouts
from planner.trace.interpret import execute


def check(op: str, tensors: dict[str, Tensor], **arguments: Argument) -> None:
    """The layout of the first result, where extents are not 1."""
    given: dict[str, Argument] = {name: Ref(name) for name in tensors}
    if op in ("einsum", "cat"):
        given = {"tensors": tuple(given.values())}
    node = Node("out", op, (*given.items(), *arguments.items()), ())
    made = execute(node, tensors, 1)
    made = made if isinstance(made, Tensor) else made[0]
    node = Node("out", op, node.arguments, (TensorType(tuple(made.shape), str(made.dtype).removeprefix("torch.")),))
    held = [Layout(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")) for t in tensors.values()]
    (found, *_), _ = result_layouts(node, held, node.types, 1, [True] * len(held))
    expected = [stride for size, stride in zip(made.shape, made.stride(), strict=True) if size != 1]
    assert [stride for size, stride in zip(found.sizes, found.strides, strict=True) if size != 1] == expected


def turned(*shape: int) -> Tensor:
    """Channels lie innermost."""
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


IMAGE, ROWS = turned(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
MASK, LINE = torch.rand(2, 8, 6, 6) > 0.5, turned(2, 8, 6)
CASES: dict[str, tuple[str, dict[str, Tensor], dict[str, Argument]]] = {
    "conv2d": ("conv2d", {"input": IMAGE, "weight": torch.randn(4, 8, 3, 3)}, {}),
    "conv2d of rows": ("conv2d", {"input": ROWS, "weight": torch.randn(4, 8, 3, 3)}, {}),
    "conv2d by a turned weight": ("conv2d", {"input": ROWS, "weight": turned(4, 8, 3, 3)}, {}),
    "conv2d of points": ("conv2d", {"input": ROWS, "weight": torch.randn(4, 8, 1, 1)}, {}),
    "depthwise": ("conv2d", {"input": IMAGE, "weight": torch.randn(8, 1, 3, 3)}, {"groups": 8}),
    "back": ("conv_transpose2d.input", {"input": IMAGE, "weight": torch.randn(8, 4, 2, 2)}, {"stride": (2, 2)}),
    "conv1d": ("conv1d", {"input": LINE, "weight": torch.randn(4, 8, 3)}, {}),
    "group_norm": ("group_norm", {"input": IMAGE}, {"num_groups": 4}),
    "avg_pool2d": ("avg_pool2d", {"self": IMAGE}, {"kernel_size": (2, 2)}),
    "max_pool2d": ("max_pool2d", {"self": IMAGE}, {"kernel_size": (2, 2)}),
    "larger": ("_upsample_bicubic2d_aa", {"self": IMAGE}, {"output_size": (9, 9), "align_corners": False}),
    "pad": ("constant_pad_nd", {"self": IMAGE}, {"pad": (1, 1)}),
    "pad of a line": ("constant_pad_nd", {"self": LINE}, {"pad": (1, 1)}),
    "cat": ("cat", {"a": IMAGE, "b": IMAGE}, {"dim": 1}),
    "cat with rows": ("cat", {"a": IMAGE, "b": ROWS}, {"dim": 1}),
    "masked_fill": ("masked_fill.Scalar", {"self": IMAGE, "mask": MASK}, {"value": 0.0}),
    "select_scatter": ("select_scatter", {"self": LINE, "src": torch.randn(2, 6)}, {"dim": 1, "index": 0}),
    "slice_scatter": ("slice_scatter", {"self": LINE, "src": torch.randn(2, 8, 2)}, {"dim": 2, "start": 0, "end": 2}),
    "slice_scatter of a part": (
        "slice_scatter", {"self": ROWS[:, 1:], "src": ROWS[:, 1:, :2]}, {"dim": 2, "start": 0, "end": 2},
    ),
    "select_scatter of one row": (
        "select_scatter", {"self": ROWS[:1, :1].expand(2, 8, 6, 6), "src": ROWS[0]}, {"dim": 0, "index": 0},
    ),
    "flip": ("flip", {"self": IMAGE}, {"dims": (1,)}),
    "sort": ("sort", {"self": IMAGE}, {}),
    "fft of rows": ("fft_fft", {"self": torch.randn(2, 8, 6)}, {"dim": 1}),
    "fft of a line": ("fft_rfft", {"self": LINE}, {"dim": 0}),
    "fft back": ("fft_irfft", {"self": torch.randn(2, 8, 6, dtype=torch.complex64)}, {"dim": 1, "n": 14}),
    "fft of two dims": ("fft_rfft2", {"self": torch.randn(2, 8, 6)}, {"dim": (-2, -1)}),
    "glu": ("glu", {"self": IMAGE}, {"dim": 1}),
    "softmax": ("softmax.int", {"self": IMAGE}, {"dim": 1}),
    "cumsum": ("cumsum", {"self": IMAGE}, {"dim": 1}),
    "sum": ("add.Tensor", {"self": IMAGE, "other": ROWS}, {}),
    "sum of rows": ("add.Tensor", {"self": ROWS, "other": IMAGE}, {}),
    "contiguous": ("contiguous", {"self": IMAGE}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_result_lies_as_torch_lays_it(name: str) -> None:
    op, tensors, arguments = CASES[name]
    check(op, tensors, **arguments)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_what_a_recurrent_network_makes_lies_step_by_step(kind: type[torch.nn.RNNBase], batch_first: bool) -> None:
    """What a block hands on is copied where it lies otherwise than row by row: masks are drawn in the order of memory."""
    given = torch.randn(2, 5, 3, dtype=torch.float64)
    outputs, ends = kind(3, 4, bidirectional=True, batch_first=batch_first, dtype=torch.float64)(given)
    made = [outputs, *(ends if isinstance(ends, tuple) else (ends,))]
    types = [TensorType(tuple(each.shape), "float64") for each in made]
    name = "rnn_tanh" if kind is torch.nn.RNN else kind.__name__.lower()
    node = Node("out", f"{name}.input", (("input", Ref("x")), ("batch_first", batch_first)), tuple(types))
    found, _ = result_layouts(node, [Layout((2, 5, 3), given.stride(), "float64")], types, 1, [True])
    assert [each.strides for each in found] == [each.stride() for each in made]


def _einsum(draw: random.Random) -> tuple[str, Tensor, Tensor]:
    """Two operands of any letters, dims in any order, in memory too; some extents are 1."""
    letters = list("abcdefg"[: draw.randint(2, 6)])
    role = {letter: draw.choice(("both", "left", "right", "sum")) for letter in letters}
    size = {letter: draw.randint(1, 4) for letter in letters}
    left, right, output = ([one for one in letters if role[one] != other] for other in ("right", "left", "sum"))
    for term in (left, right, output):
        draw.shuffle(term)

    def tensor(term: list[str]) -> Tensor:
        order = draw.sample(range(len(term)), len(term))
        return torch.randn([size[term[at]] for at in order]).permute([order.index(at) for at in range(len(term))])

    return f"{''.join(left)},{''.join(right)}->{''.join(output)}", tensor(left), tensor(right)


def test_any_einsum_of_two() -> None:
    draw, seen = random.Random(0), 0
    while seen < 400:
        equation, left, right = _einsum(draw)
        ends = equation.partition("->")[2]
        sums = [size for term, t in zip(equation.split("->")[0].split(","), (left, right), strict=True)
                for letter, size in zip(term, t.shape, strict=True) if letter not in ends]
        if ends and any(size > 1 for size in sums):
            check("einsum", {"a": left, "b": right}, equation=equation)
            seen += 1
