"""What the readers of YAML files share: strict records, numbers as YAML writes them and as far as they may go."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")


def _number(value: object) -> object:
    """``6e-4`` is a number; YAML 1.1, which PyYAML reads, takes it for text."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_number)]
"""A float field of a YAML file."""
MOST = 10**9
"""Samples of a batch, tokens of a sample, ranks of an axis: a number beyond it is a slip of the keyboard, and searches go over
its divisors."""


def of_kinds(right: str) -> WrapValidator:
    """A field that may be of several kinds: where its value is of none, ``right`` says what would be, and not each kind that
    was tried."""

    def validated(value: object, tried: ValidatorFunctionWrapHandler) -> Any:
        try:
            return tried(value)
        except ValidationError:
            raise PydanticCustomError("kinds", "{right}", {"right": right}) from None

    return WrapValidator(validated)


Count = Annotated[int, Field(gt=0, le=MOST)]
"""A field that counts something of which there is one at least."""


class Record(BaseModel):
    """A mapping of known fields; unknown ones are refused, so that a typing error cannot pass silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
