"""Functions of a chip are called as the operations of a trace are; another name would say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles import profile_names, resolve_cluster
from hardware_profiles.measure.probes import FUNCTIONS
from planner.cli import main
from planner.compile import load_cluster
from planner.ir.errors import ProfileError
from planner.ops.families import ATTENTION, CREATIONS, GEMMS, VIEW_FAMILY
from planner.ops.functions import check_functions, function_names
from planner.rules.table import RULES

FILE = "base: dgx-a100-80gb\nnodes: 1\nchip: {{functions: {{{}: {{value: 5, unit: ns/element, kind: given, source: abc}}}}}}\n"


@pytest.mark.slow
def test_what_is_measured_and_what_profiles_have_is_known() -> None:
    check_functions([*FUNCTIONS, *(f"{name}_backward" for name in FUNCTIONS)], "mine.yaml")
    for name in profile_names():
        check_functions(resolve_cluster(f"{name}:1").chip.functions, name)


def test_every_memory_bound_operation_with_a_rule_is_known() -> None:
    priced = VIEW_FAMILY | CREATIONS | GEMMS | {ATTENTION}
    assert set(RULES) <= function_names() | priced
    assert not function_names() & (priced | {"gelu_", "gelu_backward"})


@pytest.mark.parametrize(("name", "says"), [
    ("gellu", "write gelu"), ("gellu_backward", "write gelu_backward"), ("layernorm", "layer_norm"), ("linear", "no product"),
    ("gelu_backward_backward", "is no operation"), ("view", "is no operation"), ("zzzzzzzzzz", "write gelu,"),
])
def test_a_misspelt_function_is_refused_by_name(name: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE.format(name))
    for spec in (str(path), f"{path}:2"):
        with pytest.raises(ProfileError) as error:
            load_cluster(spec)
        assert error.value.where == f"{path}: chip.functions.{name}" and says in str(error.value)


def test_hardware_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE.format("gellu"))
    with pytest.raises(SystemExit) as left:
        main(["hardware", str(path)])
    assert left.value.code == 2
    assert f"error: {path}: chip.functions.gellu: is no operation whose" in capsys.readouterr().err
    path.write_text(FILE.format("gelu"))
    main(["hardware", str(path)])
    assert "chip.functions.gelu" in capsys.readouterr().out
