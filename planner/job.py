"""The job: what is trained, on which cluster, with which batch. Flags and JOB.yaml both become this one frozen type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


class _Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    learning_rate: float = Field(_DEFAULTS.learning_rate, gt=0)
    weight_decay: float = Field(_DEFAULTS.weight_decay, ge=0)
    beta1: float = Field(_DEFAULTS.beta1, ge=0, lt=1)
    beta2: float = Field(_DEFAULTS.beta2, ge=0, lt=1)
    epsilon: float = Field(_DEFAULTS.epsilon, gt=0)
    clip: float = Field(_DEFAULTS.clip, ge=0)
    warmup_steps: int = Field(_DEFAULTS.warmup_steps, ge=0)


class _JobFile(BaseModel):
    """The schema of JOB.yaml; unknown fields are refused so that a typing error cannot pass silently."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    cluster: str | None = None
    batch: int | None = Field(None, gt=0)
    seq: int | None = Field(None, gt=0)
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
        raise JobError(str(path), f"cannot be read ({error})", "give a JOB.yaml or path/file.py:callable") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(str(path), f"is not YAML ({str(error).splitlines()[0]})", "see docs/job.md") from error
    if not isinstance(data, dict):
        raise JobError(str(path), "holds no mapping", "a job has at least the fields model and cluster")
    try:
        return _JobFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise JobError(f"{path}: {where}", first["msg"], f"known fields: {', '.join(_JobFile.model_fields)}") from error


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
    if model.endswith((".yaml", ".yml")):
        path = Path(model)
        file = read_job_file(path)
        model_spec = _relative_to(path, file.model)
        constraints = tuple(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in file.constraints.items())
    else:
        file, model_spec, constraints = _JobFile(model=model), model, ()
    cluster = cluster if cluster is not None else file.cluster
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


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise JobError(flag, f"is {value}", "give a positive number")
    return value


def _precision(value: str | None) -> Precision | None:
    match value:
        case None | "bf16" | "fp16" | "fp32" | "fp64":
            return value
    raise JobError("--precision", f"is {value!r}", "one of bf16, fp16, fp32, fp64")
