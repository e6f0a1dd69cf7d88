"""What an einsum of the graph becomes computes what torch's own does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.types import Ref, TensorType
from planner.trace.einsums import in_pairs
from planner.trace.interpret import execute

EXTENTS = {"a": 2, "b": 3, "c": 4, "d": 1}


def parts(equation: str, *operands: Tensor) -> tuple[list[Node], Tensor]:
    """The nodes of an einsum of these operands, and what they compute."""
    values = dict(zip("xyz", operands, strict=False))
    types = {name: TensorType(tuple(tensor.shape), "float64") for name, tensor in values.items()}
    whole = torch.einsum(equation, *operands)
    said = (("equation", equation), ("tensors", tuple(map(Ref, values))), ("path", None))
    node = Node("out", "einsum", said, (TensorType(tuple(whole.shape), "float64"),), differentiable=True)
    nodes = list(in_pairs(node, types))
    for each in nodes:
        values[each.name] = execute(each, values, 1)
        assert tuple(values[each.name].shape) == each.type.shape
    return nodes, values["out"]


@pytest.mark.parametrize(("equation", "shapes", "bases"), [
    ("rg,rk->rgk", [(6, 4), (6, 5)], ["unsqueeze", "unsqueeze", "mul"]),
    ("i,j->ij", [(6,), (4,)], ["unsqueeze", "unsqueeze", "mul"]),
    ("ij,jk->kij", [(2, 3), (3, 4)], ["unsqueeze", "permute", "unsqueeze", "mul"]),
    ("ij,ij->ij", [(2, 3), (2, 3)], ["mul"]),
    ("ijk->ik", [(2, 3, 4)], ["sum"]),
    ("ijk->ki", [(2, 3, 4)], ["sum", "permute"]),
    ("ij->ij", [(2, 3)], ["alias"]),
    ("ijk,kl->il", [(2, 3, 4), (4, 5)], ["sum", "einsum"]),
    ("ii->i", [(3, 3)], ["einsum"]),
    ("bqd,bkd->bqk", [(2, 3, 4), (2, 5, 4)], ["einsum"]),
])
def test_form(equation: str, shapes: list[tuple[int, ...]], bases: list[str]) -> None:
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    nodes, found = parts(equation, *operands)
    assert [node.base for node in nodes] == bases
    assert torch.equal(found, torch.einsum(equation, *operands))


def test_any_equation() -> None:
    """Of one to three operands; some dims have one element, here or where it is broadcast."""
    draw = random.Random(5)
    for _ in range(600):
        terms = ["".join(draw.sample("abcd", draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        letters = sorted(set("".join(terms)))
        result = "".join(draw.sample(letters, draw.randint(0, len(letters))))
        operands = [
            torch.randn([1 if draw.random() < 0.1 else EXTENTS[letter] for letter in term], dtype=torch.float64)
            for term in terms
        ]
        equation = f"{','.join(terms)}->{result}"
        _, found = parts(equation, *operands)
        torch.testing.assert_close(found, torch.einsum(equation, *operands), rtol=1e-12, atol=1e-12)
