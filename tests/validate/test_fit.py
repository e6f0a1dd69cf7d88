"""Fitting: the optimum of a linear problem, parameters that move what they name, and files that keep everything else."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from hardware_profiles import engine, resolve_cluster
from planner.validate.fit import Fit, _Linear, _optimum
from planner.validate.parameters import CHIP_CLASSES, Parameter, Trial, parameters
from planner.validate.write import FOLDER, replaced, write_fit

FOUND = parameters(
    frozenset({"A100-SXM-80GB", "H100-SXM-80GB", "TPUv6e"}), frozenset({"megatron", "torchtitan-eager+fp8"}),
    frozenset({"InfiniBand HDR"}),
)  # fmt: skip
BY_NAME = {item.name: item for item in FOUND}


def test_the_optimum_of_a_linear_problem_is_the_robust_one() -> None:
    """Three of four rows want the parameter a tenth higher, one is far off: the median wins, less a little for the prior."""
    item = Parameter("engine", "any", "pointwise_traffic", 1.0, 0.5, 0.1, 4.0, 1.0)
    errors = np.array([-0.1, -0.1, -0.1, 2.0])
    point = _optimum(_Linear(np.zeros(1), errors, np.ones((4, 1))), np.full(4, 0.25), np.array([[4.0]]), [item])
    assert point[0] == pytest.approx(0.1, abs=0.03)


def test_a_bound_is_never_passed() -> None:
    item = Parameter("engine", "any", "gathers_floor", 0.5, 0.5, 0.02, 1.0, 0.5)
    line = _Linear(np.zeros(1), np.array([-3.0]), np.ones((1, 1)))
    point = _optimum(line, np.ones(1), np.array([[4.0]]), [item])
    assert 0.5 * math.exp(point[0]) <= 1.0 + 1e-12


def test_parameters_are_few_and_start_at_what_the_files_have() -> None:
    assert BY_NAME["ampere.gemm"].start == resolve_cluster("dgx-a100-80gb:1").chip.gemm["bfloat16"].maximum
    assert BY_NAME["megatron.pointwise_traffic"].start == engine("megatron").pointwise_traffic
    assert "torchtitan+fp8.cast_passes" in BY_NAME
    assert not any(item.subject in ("nanotron", "volta") for item in FOUND)
    assert all(item.low <= item.expected <= item.high for item in FOUND)


def test_a_trial_moves_what_it_names_and_nothing_else() -> None:
    cluster = resolve_cluster("dgx-a100-80gb:2")
    names = ("ampere.gemm", "infiniband.efficiency", "megatron.pointwise_traffic")
    trial = Trial(dict(zip((BY_NAME[name] for name in names), (0.5, 0.4, 2.0), strict=True)))
    moved = trial.change(cluster)
    assert moved.chip.gemm["bfloat16"].maximum == pytest.approx(0.5)
    assert moved.chip.gemm["float32"] == cluster.chip.gemm["float32"]
    assert [level.link.efficiency for level in moved.levels] == [cluster.levels[0].link.efficiency, 0.4]
    assert trial.engine("megatron-2022") == replace(engine("megatron-2022"), pointwise_traffic=2.0)
    assert trial.engine("fsdp") == engine("fsdp")
    hopper = resolve_cluster("dgx-h100:1")
    assert trial.change(hopper).chip == hopper.chip


def test_a_quantity_is_replaced_in_its_own_unit() -> None:
    inner = "a:\n  launch: {value: 3, unit: us, kind: datasheet, source: \"x y z\"}\n"
    text = inner + "launch: {value: 1, unit: s, kind: fitted, source: \"abc\"}\n"
    after = replaced(text, "a.launch", lambda old: 2 * old, "twice")
    assert after.splitlines()[1] == '  launch: {value: 6, unit: us, kind: fitted, source: "twice"}'
    assert after.splitlines()[2] == text.splitlines()[2]
    assert replaced(text, "a.nothing", lambda old: 0.0, "x") == text


def test_a_fit_rewrites_the_files_of_its_parameters(tmp_path: Path) -> None:
    for kind in ("chips", "profiles", "engines"):
        shutil.copytree(FOLDER / kind, tmp_path / kind)
    items = (BY_NAME["ampere.gemm"], BY_NAME["megatron.pointwise_traffic"], BY_NAME["hopper.attention"])
    result = Fit(
        items, (0.5, 1.5, 0.3), (("One", "Two"), ("Three",), ()), frozenset({"A100-SXM-80GB"}), 0.1, 0.05, 0.06, {},
    )
    changed = {path.name for path in write_fit(result, tmp_path)}
    assert changed == {"a100-sxm-40gb.yaml", "a100-sxm-80gb.yaml", "a800-sxm-80gb.yaml", "megatron.yaml"}
    chip = yaml.safe_load((tmp_path / "chips" / "a100-sxm-80gb.yaml").read_text())
    assert chip["gemm"]["bfloat16"]["maximum"] == {
        "value": 0.5, "unit": "ratio", "kind": "fitted", "source": "fitted to One, Two (shardwright validate --fit)",
    }
    other = yaml.safe_load((tmp_path / "chips" / "a800-sxm-80gb.yaml").read_text())
    assert other["gemm"]["bfloat16"]["maximum"]["source"].startswith("class estimate, fitted to One")
    before = yaml.safe_load((FOLDER / "chips" / "a100-sxm-80gb.yaml").read_text())
    del before["gemm"], chip["gemm"]
    assert chip == before


def test_every_class_names_chips_that_exist() -> None:
    known = {yaml.safe_load(path.read_text())["name"] for path in (FOLDER / "chips").glob("*.yaml")}
    named = [name for names in CHIP_CLASSES.values() for name in names]
    assert set(named) <= known
    assert len(named) == len(set(named))
