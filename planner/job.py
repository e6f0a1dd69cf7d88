"""The job: what is trained, on which cluster, with which batch. Flags and JOB.yaml both become this one frozen type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from planner.fields import Number, Record, first_problem, parse_mapping
from planner.ir.errors import JobError
from planner.ir.plan import OptimizerSettings, Precision

Setting = bool | int | float | str | None


@dataclass(frozen=True)
class Job:
    """``batch``: global batch in samples (None: eight a device). ``sequence``: None leaves it to the model.
    ``precision``: None picks the cluster's best training dtype. ``pins``: ``K=V`` texts."""

    model: str
    cluster: str
    batch: int | None = None
    sequence: int | None = None
    precision: Precision | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    gap: float = 0.001
    time_limit_s: float | None = None


_DEFAULTS = OptimizerSettings()


class _Optimizer(Record):
    """AdamW and its schedule: the defaults of the emitted program's flags."""

    learning_rate: Number = Field(default=_DEFAULTS.learning_rate, gt=0)
    weight_decay: Number = Field(default=_DEFAULTS.weight_decay, ge=0)
    beta1: Number = Field(default=_DEFAULTS.beta1, ge=0, lt=1)
    beta2: Number = Field(default=_DEFAULTS.beta2, ge=0, lt=1)
    epsilon: Number = Field(default=_DEFAULTS.epsilon, gt=0)
    clip: Number = Field(default=_DEFAULTS.clip, ge=0)
    warmup_steps: int = Field(default=_DEFAULTS.warmup_steps, ge=0)


class _JobFile(Record):
    """The schema of JOB.yaml."""

    model: str
    cluster: str | None = None
    batch: int | None = Field(default=None, gt=0)
    seq: int | None = Field(default=None, gt=0)
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    set: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    optimizer: _Optimizer = Field(default_factory=_Optimizer)
    constraints: dict[str, bool | int | str] = Field(default_factory=dict)


def job_schema() -> dict[str, Any]:
    """The JSON schema of JOB.yaml."""
    return _JobFile.model_json_schema()


def read_job_file(path: Path) -> _JobFile:
    """Read and validate JOB.yaml. Raises JobError naming the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
        raise JobError(str(path), wrong, "give a JOB.yaml or path/file.py:callable") from error
    try:
        data = parse_mapping(text)
    except ValueError as error:
        raise JobError(str(path), str(error), "a job has at least the fields model and cluster") from error
    try:
        return _JobFile.model_validate(data)
    except ValidationError as error:
        field, wrong, right = first_problem(error)
        raise JobError(f"{path}: {field}", wrong, f"{right} (see docs/job.md)") from error


def parse_settings(texts: Sequence[str]) -> dict[str, Setting]:
    """``K=V`` texts of ``--set``; values are YAML scalars (``24``, ``0.1``, ``true``, ``name``)."""
    settings: dict[str, Setting] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise JobError("--set", f"{text!r} is no assignment", "write --set layers=24")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        if isinstance(parsed, str):
            # YAML 1.1 reads 1e-4 as text.
            try:
                parsed = float(parsed)
            except ValueError:
                parsed = str(parsed)
        if parsed is not None and not isinstance(parsed, (bool, int, float, str)):
            raise JobError("--set", f"{key} is {value!r}", "give a number, true, false or a word")
        settings[key] = parsed
    return settings


def make_job(
    model: str,
    *,
    cluster: str | None,
    batch: int | None,
    sequence: int | None,
    precision: str | None,
    settings: Sequence[str],
    pins: Sequence[str],
    gap: float,
    time_limit_s: float | None,
) -> Job:
    """Combine a model or JOB.yaml with flags, which override it. Raises JobError."""
    given = parse_settings(settings)
    if not gap >= 0:
        raise JobError("--gap", f"is {gap}", "give a part of the step time, for example 0.001")
    if time_limit_s is not None and not time_limit_s > 0:
        raise JobError("--time-limit", f"is {time_limit_s}", "give a positive number of seconds")
    if model.endswith((".yaml", ".yml")):
        path = Path(model)
        file = read_job_file(path)
        model_spec = _relative_to(path, file.model)
        constraints = tuple(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in file.constraints.items())
    else:
        file, model_spec, constraints = _JobFile(model=model), model, ()
    cluster = cluster if cluster is not None else file.cluster and _cluster_of(Path(model), file.cluster)
    if cluster is None:
        raise JobError("--cluster", "is missing", "for example --cluster dgx-h100:32 (see `shardwright hardware`)")
    pinned = {text.partition("=")[0] for text in pins}
    kept = tuple(text for text in constraints if text.partition("=")[0] not in pinned)
    return Job(
        model=model_spec,
        cluster=cluster,
        batch=_positive("--batch", batch if batch is not None else file.batch),
        sequence=_positive("--seq", sequence if sequence is not None else file.seq),
        precision=_precision(precision) or file.precision,
        settings={**file.set, **given},
        pins=(*kept, *pins),
        optimizer=OptimizerSettings(**file.optimizer.model_dump()),
        gap=gap,
        time_limit_s=time_limit_s,
    )


def _relative_to(job_file: Path, spec: str) -> str:
    """A model path in a job file is relative to that file."""
    prefix, path = ("hf:", spec[3:]) if spec.startswith("hf:") else ("", spec)
    return prefix + (path if Path(path).is_absolute() else str(job_file.parent / path))


def _cluster_of(job_file: Path, spec: str) -> str:
    """A cluster's YAML in a job file is relative to that file."""
    file = spec if spec.endswith((".yaml", ".yml")) else spec.rpartition(":")[0]
    return _relative_to(job_file, spec) if file.endswith((".yaml", ".yml")) else spec


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise JobError(flag, f"is {value}", "give a positive number")
    return value


def _precision(value: str | None) -> Precision | None:
    match value:
        case None | "bf16" | "fp16" | "fp32" | "fp64":
            return value
    raise JobError("--precision", f"is {value!r}", "one of bf16, fp16, fp32, fp64")
