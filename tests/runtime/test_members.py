"""No member of a block hides what a user's module is called: code generation knows them all, and calls the user's otherwise."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from codegen.members import OF_BLOCKS, OF_MODULES, OF_UNITS, attribute_paths
from runtime import launch
from runtime.block import Block
from runtime.collectives import TensorAxis
from runtime.zero import Microbatching, shard


def members(thing: object) -> set[str]:
    """All names but Python's own, and what other libraries put on torch's class (transformers does, once it is imported)."""
    others = {name for name, value in vars(nn.Module).items() if not getattr(value, "__module__", "torch").startswith("torch")}
    return {name for name in dir(thing) if not name.startswith("__")} - others


def stage(zero: int) -> tuple[nn.Module, Block]:
    """A stage of one block, as a program makes it."""
    with torch.device("meta"):
        block = Block("", TensorAxis(None, 0, 1), {}, {"key": torch.zeros(2)})
        block.declare("user.weight", (4, 2))
        block.constant("mask", "key")
        module = nn.Module()
        module.blocks = nn.ModuleList([block])
    shard([block], [zero], launch.start(device="cpu").data_mesh, "fp32")
    Microbatching(module)
    return module, block


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero", [0, 3])
def test_they_are_known(zero: int) -> None:
    module, block = stage(zero)
    assert members(block) - {"user", "mask"} <= OF_BLOCKS
    assert members(module) - {"blocks"} <= OF_UNITS
    assert members(nn.Module()) <= OF_MODULES


def test_what_emitted_classes_have_besides_is_known() -> None:
    """What is made of regions (``core``) is called after the user's modules."""
    programs = [ast.parse(path.read_text()) for path in (Path(__file__).parents[1] / "golden").glob("*/model.py")]
    classes = [node for program in programs for node in program.body if isinstance(node, ast.ClassDef) and node.name != "Stage"]
    found = {target.id for node in classes for part in node.body if isinstance(part, ast.Assign)
             for target in part.targets if isinstance(target, ast.Name)}
    found |= {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
    assert {"paths", "recomputes", "forward", "core", "__init__"} <= found <= OF_BLOCKS | {"core", "__init__"}


@pytest.mark.usefixtures("alone")
def test_a_user_may_have_all_of_these_names() -> None:
    _, known = stage(3)
    names = sorted(members(known))
    wanted = [f"{name}.{inner}.weight" for name in names for inner in ("tensor", "type")]
    paths = attribute_paths(wanted)
    with torch.device("meta"):
        block: Any = Block("", TensorAxis(None, 0, 1), {paths[fqn]: fqn for fqn in wanted})
        for fqn in wanted:
            block.declare(paths[fqn], (4, 2))
    shard([block], [3], launch.start(device="cpu").data_mesh, "fp32")
    assert [declaration.fqn for declaration, _ in block.entries()] == wanted
    for declaration, parameter in block.entries():
        holder = block
        for part in paths[declaration.fqn].split("."):
            holder = getattr(holder, part)
        assert holder is parameter


def test_only_what_is_in_the_way_is_called_otherwise() -> None:
    paths = ["tensor.weight", "tensor_.bias", "attention.tensor", "attention.type.weight", "core.weight"]
    assert list(attribute_paths(paths).values()) == [
        "tensor__.weight", "tensor_.bias", "attention.tensor", "attention.type_.weight", "core.weight",
    ]
