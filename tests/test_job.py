"""JOB.yaml and flags become one job; what is wrong is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.constraints import NAMES
from planner.ir.errors import JobError
from planner.job import Goal, Job, Objective, _Constraints, make_job, parse_settings


def job(model: str, **changes: object) -> Job:
    arguments: dict[str, object] = {
        "cluster": None, "batch": None, "sequence": None, "precision": None, "settings": [], "gap": 0.001,
        "time_limit_s": None,
    }
    return make_job(model, **(arguments | changes))  # type: ignore[arg-type]


def test_settings_are_yaml_scalars() -> None:
    assert parse_settings(["layers=24", "dropout=1e-1", "tied=false", "name=x", "none=null", "part.name=3"]) == {
        "layers": 24, "dropout": 0.1, "tied": False, "name": "x", "none": None, "part.name": 3,
    }


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("010", 10), ("1:30", "1:30"), ("no", "no"), ("on", "on"), ("True", True), ("0o10", 8), ("0x1F", 31),
    ("1_000", "1_000"), ("2024-01-01", "2024-01-01"), ("~", None), ("", None), ("'010'", "010"), ('"1e-4"', "1e-4"),
    ("-.5", -0.5), ("1.", 1.0), ("nan", "nan"), ("=", "="), ("0b11", "0b11"),
])
def test_a_file_and_a_flag_mean_the_same_by_a_setting(text: str, value: object, tmp_path: Path) -> None:
    """YAML 1.2's core schema in both."""
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m.py:build\ncluster: dgx-h100:1\nset: {{x: {text}}}\n")
    read, given = job(str(path)).settings["x"], job("m.py:build", cluster="dgx-h100:1", settings=[f"x={text}"]).settings["x"]
    assert (type(read), read) == (type(given), given) == (type(value), value)


def test_a_job_s_other_fields_are_read_so_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: m.py:build\ncluster: dgx-h100:1\nbatch: 0100\noptimizer: {learning_rate: 1e-4}\n")
    assert (job(str(path)).batch, job(str(path)).optimizer.learning_rate) == (100, 1e-4)


def test_a_setting_is_given_once() -> None:
    with pytest.raises(JobError, match="--set: layers is given twice"):
        parse_settings(["layers=2", "layers=3"])


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    "layers", "=3", "x=" + "[" * 10_000, "x=" + "9" * 5_000, "x=!!bool yes", "a b=1", "x=[1, 2]", "x.=1",
])
def test_a_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--set"):
        parse_settings([text])


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: m.py:build\nset: {layers: 2, hidden: 8}\ncluster: dgx-h100:1\nbatch: 64\nseq: 32\nprecision: bf16\n"
        "optimizer: {learning_rate: 0.01}\nconstraints: {tensor: 4, sequence_parallel: true, zero: 1}\n"
    )
    made = job(str(path), batch=128, settings=["layers=3"], pins=["tensor=8"])
    assert made.model == str(tmp_path / "m.py:build")
    assert (made.batch, made.sequence, made.precision, made.cluster) == (128, 32, "bf16", "dgx-h100:1")
    assert made.settings == {"layers": 3, "hidden": 8}
    assert list(map(str, made.constraints.conditions)) == ["zero=1", "sequence_parallel=true", "tensor=8"]
    assert made.optimizer.learning_rate == 0.01


@pytest.mark.parametrize(("text", "named"), [
    ("model: [", "YAML"),
    ("- 1", "mapping"),
    ("cluster: dgx-h100:1", "model"),
    ("model: m.py:b\nbatsh: 3", "batsh"),
    ("model: m.py:b\nbatch: many", "batch"),
    ("model: m.py:b\noptimizer: {learning_rate: -1}", "optimizer.learning_rate"),
    ("model: m.py:b\noptimizer: {warmup_steps: 9999999999}", "optimizer.warmup_steps: is 9999999999; .* 1000000000"),
    ("model: m.py:b\nprecision: int8", "precision"),
])
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=named):
        job(str(path), cluster="dgx-h100:1")


@pytest.mark.parametrize(("text", "said"), [
    ("within: 10%", "within: means nothing to the objective time"),
    ("objective: memory\nmax_step_s: 3", "max_step_s: means nothing to the objective memory"),
    ("min_tokens_per_s: 3", "min_tokens_per_s: means nothing to the objective time"),
    ("objective: devices", "objective: devices needs one target"),
    ("objective: memory\nwithin: much", "within: is 'much'"),
    ("batch: 9999999999", "batch: has 10 digits"),
    ("seq: 9999999999", "seq: has 10 digits"),
])
def test_what_does_not_go_together_is_named_where_it_stands(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m.py:b\n{text}\n")
    with pytest.raises(JobError, match=f"^{re.escape(f'{path}: {said}')}"):
        job(str(path), cluster="dgx-h100:1")


def test_a_flag_is_named_where_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: m.py:b\nbatch: 4\nwithin: 10%\n")
    with pytest.raises(JobError, match=r"^--within: means nothing"):
        job(str(path), cluster="dgx-h100:1", goal=Goal(within="20%"))
    with pytest.raises(JobError, match=r"job\.yaml: cluster: is missing; give one, for example dgx-h100:32"):
        job(str(path))


def test_the_cluster_is_required() -> None:
    with pytest.raises(JobError, match="--cluster"):
        job("m.py:build")


@pytest.mark.parametrize("changes", [{"batch": 0}, {"sequence": -1}, {"precision": "int4"}])
def test_impossible_numbers(changes: dict[str, object]) -> None:
    with pytest.raises(JobError):
        job("m.py:build", cluster="dgx-h100:1", **changes)


def test_files_of_a_job_lie_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: hf:llama\ncluster: mine.yaml:2\n")
    assert (job(str(path)).model, job(str(path)).cluster) == (f"hf:{tmp_path / 'llama'}", str(tmp_path / "mine.yaml:2"))
    assert job(str(path), cluster="other.yaml").cluster == "other.yaml"


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: m.py:b\ncluster: dgx-h100:1\noptimizer: {learning_rate: 6e-4, epsilon: 1E-8, clip: 1}\n")
    optimizer = job(str(path)).optimizer
    assert (optimizer.learning_rate, optimizer.epsilon, optimizer.clip) == (6e-4, 1e-8, 1.0)


@pytest.mark.parametrize("changes", [{"gap": -1.0}, {"gap": float("nan")}, {"time_limit_s": 0.0}])
def test_impossible_limits(changes: dict[str, object]) -> None:
    with pytest.raises(JobError):
        job("m.py:build", cluster="dgx-h100:1", **changes)


def test_a_file_can_limit_every_decision() -> None:
    assert set(_Constraints.model_fields) == {*NAMES, "layers", "forbid", "headroom"}


@pytest.mark.parametrize(("file", "goal", "made"), [
    ("objective: memory\nwithin: 10%", Goal("time"), Objective("time")),
    ("objective: memory\nwithin: 10%", Goal("devices", max_step_s=3.0), Objective("devices", max_step_s=3.0)),
    ("objective: devices\nmax_step_s: 10", Goal("time"), Objective("time")),
    ("objective: memory\nwithin: 10%", Goal("memory"), Objective("memory", within=0.1)),
])
def test_another_objective_leaves_the_files(tmp_path: Path, file: str, goal: Goal, made: Objective) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m.py:b\ncluster: dgx-h100:1\n{file}\n")
    assert job(str(path), goal=goal).objective == made
