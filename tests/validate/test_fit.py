"""Fitting: the optimum of a linear problem, parameters that move what they name, and files that keep everything else."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from hardware_profiles import Engine, engine, resolve_cluster
from hardware_profiles.engine import origin
from planner.commands.validate import _fitted
from planner.ir.errors import JobError
from planner.validate import parameters as module
from planner.validate.descent import Line, Problem, model_optimum
from planner.validate.fit import Fit, fit
from planner.validate.parameters import CHIP_CLASSES, Parameter, Trial, half_work, parameters
from planner.validate.prepare import Prepared, prepare_rows
from planner.validate.write import FOLDER, replaced, write_fit
from tests.validate import tables

FOUND = parameters(
    frozenset({"A100-SXM-80GB", "H100-SXM-80GB", "TPUv6e"}), frozenset({"megatron", "torchtitan-eager+fp8"}),
    frozenset({"InfiniBand HDR"}),
)  # fmt: skip
BY_NAME = {item.name: item for item in FOUND}


def _optimum(item: Parameter, errors: list[float]) -> float:
    """Where one parameter goes that moves every row's logarithmic error by as much as itself."""
    problem = Problem((), (item,), np.full(len(errors), 1 / len(errors)))
    line = Line(np.zeros(1), np.array(errors), np.ones((len(errors), 1)), 0.0)
    return float(model_optimum(problem, line)[0])


def test_the_optimum_of_a_linear_problem_is_the_robust_one() -> None:
    """Three of four rows want the parameter a tenth higher, one is far off: the median wins, less a little for the prior."""
    item = Parameter("engine", "xla", "pointwise_traffic", 1.0, 0.5, 0.1, 4.0)
    assert _optimum(item, [-0.1, -0.1, -0.1, 2.0]) == pytest.approx(0.1, abs=0.03)


def test_a_bound_is_never_passed() -> None:
    item = Parameter("engine", "xla", "gathers_floor", 0.5, 0.5, 0.02, 1.0)
    assert 0.5 * math.exp(_optimum(item, [-3.0])) == pytest.approx(1.0)


def test_parameters_are_few_and_begin_at_what_is_expected_of_their_class() -> None:
    assert "torchtitan+fp8.cast_passes" in BY_NAME
    assert not any(item.subject in ("nanotron", "volta") for item in FOUND)
    assert all(item.low <= item.expected <= item.high for item in FOUND)
    fields = {(item.kind, item.field): item.expected for item in FOUND}
    assert all(fields[item.kind, item.field] == item.expected for item in FOUND)


ROWS = [
    {"engine": "megatron-core", "n_gpus": "2", "tp": "2", "hidden": "1024", "ffn_hidden": "4096", "family": "one"},
    {"engine": "megatron-core", "hidden": "2048", "ffn_hidden": "8192", "family": "one", "step_time_s": "0.02"},
    {"engine": "torchtitan", "compile_or_fp8": "compile", "hidden": "1024", "ffn_hidden": "4096", "family": "two",
     "step_time_s": "0.03"},
]


@pytest.mark.slow
def test_a_fit_is_a_function_of_rows_and_priors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same to the last digit when it is run again, and whatever chips, links and engines have now."""
    rows = prepare_rows([tables.row(row_id=str(at), **change) for at, change in enumerate(ROWS)]).rows
    first = fit(rows)
    assert first == fit(rows)
    assert first.after < first.before

    def moved(name: str) -> Engine:
        found = engine(name)
        fitted = (item.field for item in first.parameters if origin(name, item.field) == item.subject)
        return replace(found, **{field: 1.3 * getattr(found, field) for field in fitted})

    everything = Trial({item: math.sqrt(item.low * item.high) for item in first.parameters})
    monkeypatch.setattr(module, "engine", moved)
    elsewhere = [replace(row, job=replace(row.job, cluster=everything.change(row.job.cluster))) for row in rows]
    assert elsewhere[0].job.cluster != rows[0].job.cluster
    again = fit(elsewhere)
    assert (again.values, again.by_family) == (first.values, first.by_family)


@pytest.mark.slow
def test_a_floor_that_nothing_touches_is_reached_by_a_sweep() -> None:
    """As expected of any engine the host is never waited for; a row that is launch-bound tells what it takes."""
    slow = {"engine": "torchtitan", "compile_or_fp8": "compile", "layers": "4", "step_time_s": "0.1"}
    found = fit(prepare_rows([tables.row(**slow)]).rows)
    values = {item.field: (value, item) for item, value in zip(found.parameters, found.values, strict=True)}
    assert values["host_s"][0] > 2 * values["host_s"][1].expected


def test_a_trial_moves_what_it_names_and_nothing_else() -> None:
    cluster = resolve_cluster("dgx-a100-80gb:2")
    names = ("ampere.gemm", "infiniband.efficiency", "megatron.pointwise_traffic")
    trial = Trial(dict(zip((BY_NAME[name] for name in names), (0.5, 0.4, 2.0), strict=True)))
    moved = trial.change(cluster)
    assert moved.chip.gemm["bfloat16"].maximum == 0.5
    assert moved.chip.gemm["bfloat16"].half_work_flops == half_work("ampere", 312e12, 0.5)
    assert moved.chip.gemm["float32"] == cluster.chip.gemm["float32"]
    assert [level.link.efficiency for level in moved.levels] == [cluster.levels[0].link.efficiency, 0.4]
    assert trial.engine("megatron-2022") == replace(engine("megatron-2022"), pointwise_traffic=2.0)
    assert trial.engine("fsdp") == engine("fsdp")
    hopper = resolve_cluster("dgx-h100:1")
    assert trial.change(hopper).chip == hopper.chip


def test_a_quantity_is_replaced_in_its_own_unit() -> None:
    inner = "a:\n  launch: {value: 3, unit: us, kind: datasheet, source: \"x y z\"}\n"
    text = inner + "launch: {value: 1, unit: s, kind: fitted, source: \"abc\"}\n"
    after = replaced(text, "a.launch", 6e-6, "twice")
    assert after.splitlines()[1] == '  launch: {value: 6, unit: us, kind: fitted, source: "twice"}'
    assert after.splitlines()[2] == text.splitlines()[2]
    assert replaced(text, "a.nothing", 0.0, "x") == text


@pytest.mark.slow
def test_a_fit_rewrites_the_files_of_its_parameters(tmp_path: Path) -> None:
    for kind in ("chips", "profiles", "engines"):
        shutil.copytree(FOLDER / kind, tmp_path / kind)
    items = (BY_NAME["ampere.gemm"], BY_NAME["megatron.pointwise_traffic"], BY_NAME["hopper.attention"])
    result = Fit(
        items, (0.5, 1.5, 0.3), (("One", "Two"), ("Three",), ()), frozenset({"A100-SXM-80GB"}), 0.1, 0.05, 0.06, {},
    )
    changed = {path.name for path in write_fit(result, tmp_path)}
    ampere = {"a100-sxm-40gb.yaml", "a100-sxm-80gb.yaml", "a800-sxm-80gb.yaml"}
    hopper = {"h100-sxm-80gb.yaml", "h100-sxm-96gb-500w.yaml", "h200-sxm-141gb.yaml", "h800-sxm-80gb.yaml"}
    assert changed == {*ampere, *hopper, "megatron.yaml"}
    untold = yaml.safe_load((tmp_path / "chips" / "h100-sxm-80gb.yaml").read_text())["attention_forward"]
    assert untold["value"] == 0.3 and untold["source"].startswith("class estimate: no run tells it apart")
    chip = yaml.safe_load((tmp_path / "chips" / "a100-sxm-80gb.yaml").read_text())
    assert chip["gemm"]["bfloat16"]["maximum"] == {
        "value": 0.5, "unit": "ratio", "kind": "fitted", "source": "fitted to One, Two (shardwright validate --fit)",
    }
    other = yaml.safe_load((tmp_path / "chips" / "a800-sxm-80gb.yaml").read_text())
    assert other["gemm"]["bfloat16"]["maximum"]["source"].startswith("class estimate, fitted to One")
    before = yaml.safe_load((FOLDER / "chips" / "a100-sxm-80gb.yaml").read_text())
    del before["gemm"], chip["gemm"]
    assert chip == before


@pytest.mark.slow
def test_a_fit_writes_the_links_that_it_tried(tmp_path: Path) -> None:
    """A file's ``half_message`` stays, so with another efficiency it says another start."""
    shutil.copytree(FOLDER / "profiles", tmp_path / "profiles")
    item = BY_NAME["infiniband.efficiency"]
    tried = Trial({item: 0.5}).change(resolve_cluster("dgx-h100:2")).levels[1].link
    write_fit(Fit((item,), (0.5,), (("One",),), frozenset(), 0.1, 0.05, 0.06, {}), tmp_path)
    written = tmp_path / "profiles" / "dgx-h100.yaml"
    again = resolve_cluster(f"{written}:2").levels[1].link
    assert replace(again, start_s=tried.start_s) == tried
    assert again.start_s == pytest.approx(tried.start_s, rel=1e-12)


@pytest.mark.slow
def test_a_users_table_rewrites_what_it_says_something_of(tmp_path: Path) -> None:
    """Numbers that other runs were fitted to stay: of other chips, and of what the table's runs do not show."""
    for kind in ("chips", "profiles", "engines"):
        shutil.copytree(FOLDER / kind, tmp_path / kind)
    values = {
        "ampere.gemm": 0.5, "gpu.launch": 1e-6, "infiniband.efficiency": 0.5, "megatron.pointwise_traffic": 1.5,
        "hopper.attention": 0.3, "ampere.attention": 0.3,
    }
    told = tuple(() if name.endswith("attention") else ("One",) for name in values)
    items = tuple(BY_NAME[name] for name in values)
    result = Fit(items, tuple(values.values()), told, frozenset({"A100-SXM-80GB"}), 0.1, 0.05, 0.06, {})
    changed = write_fit(result, tmp_path, alone=True)
    assert {path.name for path in changed if path.parent.name != "profiles"} == {"a100-sxm-80gb.yaml", "megatron.yaml"}
    machines = [yaml.safe_load(path.read_text()) for path in changed if path.parent.name == "profiles"]
    assert machines and {machine["chip"] for machine in machines} == {"a100-sxm-80gb"}
    before, after = (yaml.safe_load((folder / "chips" / "a100-sxm-80gb.yaml").read_text()) for folder in (FOLDER, tmp_path))
    assert after["attention_forward"] == before["attention_forward"] and after["launch"] != before["launch"]


@pytest.mark.slow
def test_a_chip_of_limited_power_runs_at_its_class_s_rates_times_a_clock(tmp_path: Path) -> None:
    """Trial and files alike: products and attention slow down with the clock, memory and what a kernel reaches of another do
    not."""
    chips = frozenset({"H100-SXM-80GB", "H100-SXM-96GB-500W"})
    found = {item.name: item for item in parameters(chips, frozenset(), frozenset())}
    clock = found["hopper-500w.clock"]
    assert clock.expected == pytest.approx(0.894, abs=1e-3)
    values = {found["hopper.gemm"]: 0.6, found["hopper.attention"]: 0.5, found["hopper.attention_portable"]: 0.4, clock: 0.9}
    capped, whole = resolve_cluster("grand-teton-h100:1"), resolve_cluster("dgx-h100:1")
    moved = Trial(values).change(capped).chip
    assert moved.gemm["bfloat16"].maximum == pytest.approx(0.54) and moved.attention_forward == pytest.approx(0.45)
    assert moved.attention_portable == 0.4 and moved.memory_efficiency == capped.chip.memory_efficiency
    assert Trial(values).change(whole).chip.gemm["bfloat16"].maximum == 0.6
    for kind in ("chips", "profiles", "engines"):
        shutil.copytree(FOLDER / kind, tmp_path / kind)
    families = tuple(("One",) if item == clock else ("Two",) for item in values)
    write_fit(Fit(tuple(values), tuple(values.values()), families, chips, 0.1, 0.05, 0.06, {}), tmp_path)
    written = yaml.safe_load((tmp_path / "chips" / "h100-sxm-96gb-500w.yaml").read_text())
    assert written["gemm"]["bfloat16"]["maximum"]["value"] == pytest.approx(0.54)
    source = written["attention_forward"]["source"]
    assert source.startswith("its class's at 0.900 of the clock, limited power; fitted to One, Two")
    assert written["attention_portable"]["source"].startswith("fitted to Two")


@pytest.mark.slow
def test_every_class_names_chips_that_exist() -> None:
    known = {yaml.safe_load(path.read_text())["name"] for path in (FOLDER / "chips").glob("*.yaml")}
    named = [name for names in CHIP_CLASSES.values() for name in names]
    assert set(named) <= known
    assert len(named) == len(set(named))


def test_profiles_that_cannot_be_written_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an installed package, say; without a traceback after minutes of fitting."""
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "h100.yaml")

    monkeypatch.setattr("planner.validate.fit.fit", lambda *_, **__: None)
    monkeypatch.setattr("planner.validate.write.write_fit", refused)
    with pytest.raises(JobError, match=r"--fit: h100\.yaml cannot be written \(Permission denied\); install from a clone"):
        _fitted(Prepared((), ()), alone=False)
