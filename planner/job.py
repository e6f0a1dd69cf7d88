"""The job: what is trained, on which cluster, with which batch. Flags and JOB.yaml both become this one frozen type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from hardware_profiles.files import text_of
from hardware_profiles.problems import first_problem
from hardware_profiles.yaml_text import NotYaml, load_core, parse_mapping
from planner.constraints import Constraints
from planner.constraints_conflicts import check_contradictions
from planner.constraints_text import parse_constraints, parse_section
from planner.fields import MOST, Number, Record, of_kinds
from planner.ir.errors import JobError
from planner.ir.plan import OptimizerSettings, Precision
from planner.origins import Origins, named_by

Setting = bool | int | float | str | None

_YAML = (".yaml", ".yml")
_UNQUOTED = re.compile(r"(?:^|[:,\[{]|- )\s*[>!*]")
"""Text that YAML does not take for one without quotes: a bound, another value, a glob."""
_LEAST = "a job has at least the fields model and cluster"
_A_SETTING = "give a number, true, false or a word"
_A_PART = "give a part of the step time, for example 10%"

ObjectiveName = Literal["time", "memory", "devices"]


@dataclass(frozen=True)
class Objective:
    """What `best` means. ``within``: part of the best step that least memory may cost more (None: any); ``max_step_s`` or
    ``min_tokens_per_s``: what the fewest devices must reach; ``top``: how many plans; ``pareto``: the front between time and
    memory."""

    name: ObjectiveName = "time"
    within: float | None = None
    max_step_s: float | None = None
    min_tokens_per_s: float | None = None
    top: int = 1
    pareto: bool = False


@dataclass(frozen=True)
class Job:
    """``batch``: global batch in samples (None: eight a device). ``sequence``: None leaves it to the model.
    ``precision``: None picks the cluster's best training dtype. ``constraints``: of the file and the flags together.
    ``origins``: where its values stand that may be wrong."""

    model: str
    cluster: str
    batch: int | None = None
    sequence: int | None = None
    precision: Precision | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    constraints: Constraints = field(default_factory=Constraints)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    gap: float = 0.001
    time_limit_s: float | None = None
    objective: Objective = field(default_factory=Objective)
    origins: Origins = field(default_factory=dict)


_DEFAULTS = OptimizerSettings()


class _Optimizer(Record):
    """AdamW and its schedule: the defaults of the emitted program's flags."""

    learning_rate: Number = Field(default=_DEFAULTS.learning_rate, gt=0)
    weight_decay: Number = Field(default=_DEFAULTS.weight_decay, ge=0)
    beta1: Number = Field(default=_DEFAULTS.beta1, ge=0, lt=1)
    beta2: Number = Field(default=_DEFAULTS.beta2, ge=0, lt=1)
    epsilon: Number = Field(default=_DEFAULTS.epsilon, gt=0)
    clip: Number = Field(default=_DEFAULTS.clip, ge=0)
    warmup_steps: int = Field(default=_DEFAULTS.warmup_steps, ge=0, le=MOST)


Scalar = bool | int | str
Limit = Annotated[Scalar | list[Scalar], of_kinds("give a whole number, a word, a bound such as '<= 8', or a list of values")]

_Limits = Annotated[dict[str, Limit], Field(min_length=1)]
"""Limits by the names of their decisions."""


class _Constraints(Record):
    """Limits of decisions: a value, ``"<= 8"``, or a list of values; ``layers``: by glob over the layers' names; ``forbid``:
    combinations that no plan may have; ``headroom``: memory kept free."""

    pipeline: Limit | None = None
    data: Limit | None = None
    context: Limit | None = None
    expert: Limit | None = None
    tensor: Limit | None = None
    microbatch: Limit | None = None
    virtual: Limit | None = None
    schedule: Limit | None = None
    recompute: Limit | None = None
    zero: Limit | None = None
    zero_group: Limit | None = None
    sequence_parallel: Limit | None = None
    axis_order: Limit | None = None
    layers: dict[str, _Limits] | None = None
    forbid: list[_Limits] | None = None
    headroom: str | None = None


class _JobFile(Record):
    """The schema of JOB.yaml."""

    model: str = Field(min_length=1)
    cluster: str | None = None
    batch: int | None = Field(default=None, gt=0)
    seq: int | None = Field(default=None, gt=0)
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    set: dict[str, Annotated[Setting, of_kinds(_A_SETTING)]] = Field(default_factory=dict)
    optimizer: _Optimizer = Field(default_factory=_Optimizer)
    constraints: _Constraints = Field(default_factory=_Constraints)
    objective: ObjectiveName | None = None
    within: Annotated[str | Number | None, of_kinds(_A_PART)] = None
    max_step_s: Number | None = Field(default=None, gt=0)
    min_tokens_per_s: Number | None = Field(default=None, gt=0)


def read_job_file(path: Path) -> _JobFile:
    """Read and validate JOB.yaml. Raises JobError naming the field."""
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
        raise JobError(str(path), wrong, "give a JOB.yaml or path/file.py:callable") from error
    try:
        data = parse_mapping(text, load_core)
    except ValueError as error:
        unquoted = isinstance(error, NotYaml) and _UNQUOTED.search(error.line)
        right = "put quotes around what begins with >, ! or *, as in '>= 2'" if unquoted else _LEAST
        raise JobError(str(path), str(error), right) from error
    try:
        return _JobFile.model_validate(data)
    except ValidationError as error:
        field, wrong, right = first_problem(error)
        raise JobError(f"{path}: {field}", wrong, f"{right} (see docs/job.md)") from error


def parse_settings(texts: Sequence[str]) -> dict[str, Setting]:
    """``K=V`` texts of ``--set``; values are YAML scalars (``24``, ``0.1``, ``true``, ``name``), read as a job file's are."""
    settings: dict[str, Setting] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not all(part.isidentifier() for part in key.split(".")):
            raise JobError("--set", f"{text!r} is no assignment", "write --set layers=24")
        if key in settings:
            raise JobError("--set", f"{key} is given twice", "leave one of them out")
        try:
            parsed = load_core(value)
        except yaml.YAMLError:
            parsed = value
        except (ValueError, RecursionError):  # thousands of digits or of brackets
            parsed = math.nan
        finite = not isinstance(parsed, float) or math.isfinite(parsed)
        if parsed is not None and not (isinstance(parsed, (bool, int, float, str)) and finite):
            raise JobError("--set", f"{key} is {_cut(value)!r}", _A_SETTING)
        settings[key] = parsed
    return settings


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Goal:
    """The flags about what `best` means, as they were given."""

    objective: str | None = None
    within: str | None = None
    max_step_s: float | None = None
    min_tokens_per_s: float | None = None
    top: int = 1
    pareto: bool = False


def make_job(
    model: str,
    *,
    cluster: str | None,
    batch: int | None,
    sequence: int | None,
    precision: str | None,
    settings: Sequence[str],
    pins: Sequence[str] = (),
    forbidden: Sequence[str] = (),
    headroom: str | None = None,
    gap: float,
    time_limit_s: float | None,
    goal: Goal | None = None,
) -> Job:
    """Combine a model or JOB.yaml with flags, which override it. Raises JobError or PinError."""
    given, goal = parse_settings(settings), goal or Goal()
    if not model:
        raise JobError("MODEL", "is empty", "write path/file.py:callable, hf:PATH or a JOB.yaml")
    if not gap >= 0:
        raise JobError("--gap", f"is {gap}", "give a part of the step time, for example 0.001")
    if time_limit_s is not None and not time_limit_s > 0:
        raise JobError("--time-limit", f"is {time_limit_s}", "give a positive number of seconds")
    if _is_job_file(model):
        path = Path(model)
        file = read_job_file(path)
        model_spec = _relative_to(path, file.model)
        constraints = parse_section(file.constraints.model_dump(exclude_none=True), f"{path}: constraints")
    else:
        file, model_spec, constraints = _JobFile(model=model), model, Constraints()
    constraints = constraints.replacing(parse_constraints(pins, forbidden, headroom))
    check_contradictions(constraints)
    flags = {
        "cluster": cluster, "batch": batch, "seq": sequence, "precision": precision, "objective": goal.objective,
        "within": goal.within, "max_step_s": goal.max_step_s, "min_tokens_per_s": goal.min_tokens_per_s,
    }
    missing = [name for name, value in flags.items() if value is None]
    origins = _origins(model, missing, [key for key in file.set if key not in given])
    with named_by(origins):
        return Job(
            model=model_spec,
            cluster=cluster if cluster is not None else _cluster_of(Path(model), file.cluster),
            batch=_positive("--batch", batch if batch is not None else file.batch),
            sequence=_positive("--seq", sequence if sequence is not None else file.seq),
            precision=_precision(precision) or file.precision,
            settings={**file.set, **given},
            constraints=constraints,
            optimizer=OptimizerSettings(**file.optimizer.model_dump()),
            gap=gap,
            time_limit_s=time_limit_s,
            objective=_objective(file, goal),
            origins=origins,
        )


def _is_job_file(model: str) -> bool:
    """Whether what `plan` is given is a JOB.yaml. ``hf:PATH`` names a model whatever its path ends in."""
    return model.endswith(_YAML) and not model.startswith("hf:")


def _origins(model: str, missing: Sequence[str], settings: Sequence[str]) -> Origins:
    """What errors name in place of flags: the fields of a job file for those that are ``missing``, and for its ``settings``."""
    found: dict[str, str] = {}
    if _is_job_file(model):
        found = {f"--{name.replace('_', '-')}": f"{model}: {name}" for name in missing}
        found |= {f"--set {key}": f"{model}: set.{key}" for key in settings} | {"MODEL": f"{model}: model"}
    return {**found, "cluster": found.get("--cluster", "--cluster")}  # Readers of profiles know no flag.


def input_files(model: str, job: Job) -> tuple[Path, ...]:
    """The files that a job is read from, where they are its user's: its own (``model``, as :func:`make_job` takes it), the
    model's and the cluster's."""
    named = Path(job.model.removeprefix("hf:") if job.model.startswith("hf:") else job.model.rpartition(":")[0])
    cluster = job.cluster if job.cluster.endswith(_YAML) else job.cluster.rpartition(":")[0]
    return (
        *((Path(model),) if _is_job_file(model) else ()),
        named / "config.json" if job.model.startswith("hf:") and named.is_dir() else named,
        *((Path(cluster),) if cluster.endswith(_YAML) else ()),
    )


def _objective(file: _JobFile, goal: Goal) -> Objective:
    """The file's objective and the flags', which override it. Raises JobError for what does not go together."""
    name = _objective_name(goal.objective) or file.objective or "time"
    # What the file says to its own objective is nothing to another.
    same = goal.objective is None or name == (file.objective or "time")
    within = goal.within if goal.within is not None or not same else file.within
    step_s, tokens = goal.max_step_s, goal.min_tokens_per_s
    if step_s is None and tokens is None and same:
        step_s, tokens = file.max_step_s, file.min_tokens_per_s
    for flag, value in (("--max-step-s", step_s), ("--min-tokens-per-s", tokens)):
        if value is not None and not value > 0:
            raise JobError(flag, f"is {value}", "give a positive number")
        if value is not None and name != "devices":
            raise JobError(flag, f"means nothing to the objective {name}", "leave it out, or give the objective devices")
    if name == "devices" and (step_s is None) == (tokens is None):
        raise JobError("--objective", "devices needs one target", "give either --max-step-s or --min-tokens-per-s")
    if within is not None and name != "memory":
        raise JobError("--within", f"means nothing to the objective {name}", "leave it out, or give the objective memory")
    if goal.top < 1:
        raise JobError("--top", f"is {goal.top}", "give a positive number of plans")
    if goal.pareto and (name != "time" or goal.top > 1):
        raise JobError("--pareto", "goes with neither --top nor another objective", "leave one of them out")
    if goal.top > 1 and name == "memory":
        raise JobError("--top", "goes with the objectives time and devices alone", "leave one of them out")
    return Objective(name, None if within is None else _part(within), step_s, tokens, goal.top, goal.pareto)


def _objective_name(value: str | None) -> ObjectiveName | None:
    match value:
        case None | "time" | "memory" | "devices":
            return value
    raise JobError("--objective", f"is {value!r}", "one of time, memory, devices")


def _part(value: str | float) -> float:
    """``10%`` or ``0.1``. Raises JobError."""
    text = str(value).strip()
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1000:
        raise JobError("--within", f"is {text!r}", _A_PART)
    return part


def _relative_to(job_file: Path, spec: str) -> str:
    """A model path in a job file is relative to that file."""
    prefix, path = ("hf:", spec[3:]) if spec.startswith("hf:") else ("", spec)
    return prefix + (path if Path(path).is_absolute() else str(job_file.parent / path))


def _cluster_of(job_file: Path, spec: str | None) -> str:
    """A cluster's YAML in a job file is relative to that file."""
    if spec is None:
        raise JobError("--cluster", "is missing", "give one, for example dgx-h100:32 (see `shardwright hardware`)")
    file = spec if spec.endswith(_YAML) else spec.rpartition(":")[0]
    return _relative_to(job_file, spec) if file.endswith(_YAML) else spec


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and not 1 <= value <= MOST:
        wrong = f"is {value}" if value < 1 else f"has {len(str(value))} digits"
        raise JobError(flag, wrong, "give a positive number" + (f", at most {MOST:,}" if value > MOST else ""))
    return value


def _precision(value: str | None) -> Precision | None:
    match value:
        case None | "bf16" | "fp16" | "fp32" | "fp64":
            return value
    raise JobError("--precision", f"is {value!r}", "one of bf16, fp16, fp32, fp64")
