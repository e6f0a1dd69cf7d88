"""What the readers of YAML files share: strict records, numbers as YAML writes them, errors in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from hardware_profiles.yaml_text import load

_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


def _number(value: object) -> object:
    """``6e-4`` is a number; YAML 1.1, which PyYAML reads, takes it for text."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_number)]
"""A float field of a YAML file."""


def of_kinds(right: str) -> WrapValidator:
    """A field that may be of several kinds: where its value is of none, ``right`` says what would be, and not each kind that
    was tried."""

    def validated(value: object, tried: ValidatorFunctionWrapHandler) -> Any:
        try:
            return tried(value)
        except ValidationError:
            raise PydanticCustomError("kinds", "{right}", {"right": right}) from None

    return WrapValidator(validated)


class Record(BaseModel):
    """A mapping of known fields; unknown ones are refused, so that a typing error cannot pass silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def first_problem(error: ValidationError) -> tuple[str, str, str]:
    """The first wrong field by its dotted path, what is wrong with it, and what would be right."""
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return path, "is no field", "remove it, or correct its name"
    if problem["type"] == "missing":
        return path, "is missing", "give it"
    given, right = repr(problem["input"]), problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "model_type":  # pydantic's words name a class of ours
        right = "input should be a mapping of fields"
    return path, f"is {given if len(given) <= 60 else given[:57] + '...'}", right


def parse_mapping(text: str, load: Callable[[str], object] = load) -> dict[object, object]:
    """The mapping that a YAML text holds. Raises ValueError saying, in one line, what it is instead."""
    try:
        data = load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        raise ValueError(f"is not YAML{line} ({error.problem or error.context})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(data, dict):
        raise ValueError("holds no mapping")
    return data
