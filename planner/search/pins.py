"""Pins: decisions that the user fixes with ``K=V`` texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.errors import PinError
from planner.ir.plan import SCHEDULES, ScheduleName


@dataclass(frozen=True, slots=True)
class Pins:
    """None leaves a decision to the solver."""

    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    tensor: int | None = None
    microbatch: int | None = None
    virtual: int | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None
    zero: int | None = None
    zero_group: int | None = None
    sequence_parallel: bool | None = None


_WORDS: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "recompute": RECOMPUTE_LEVELS}


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise PinError(f"--pin {name}", f"{text!r} is no degree", f"give a positive number, for example {name}=2")
    return int(text)


def _one(name: str, text: str) -> int:
    if _positive(name, text) != 1:
        raise PinError(f"--pin {name}", f"{name} parallelism of {text} is not supported yet", f"{name}=1")
    return 1


def _zero(name: str, text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise PinError(f"--pin {name}", f"{text!r} is no ZeRO stage", "one of 0, 1, 2, 3")
    return int(text)


def _word(name: str, text: str) -> str:
    if text not in _WORDS[name]:
        raise PinError(f"--pin {name}", f"{text!r} is unknown", f"one of {', '.join(_WORDS[name])}")
    return text


def _boolean(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise PinError(f"--pin {name}", f"{text!r} is neither true nor false", f"{name}=true or {name}=false")
    return text == "true"


_READERS: dict[str, Callable[[str, str], Any]] = {
    "context": _one, "expert": _one, "zero": _zero, "schedule": _word, "recompute": _word, "sequence_parallel": _boolean,
}


def parse_pins(texts: Sequence[str]) -> Pins:
    """Read ``K=V`` texts. Raises PinError naming what is allowed for unknown keys, wrong values and contradictions."""
    known = [field.name for field in fields(Pins)]
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or name not in known:
            raise PinError("--pin", f"{text!r} pins nothing", f"write K=V with K one of {', '.join(known)}")
        parsed = _READERS.get(name, _positive)(name, value)
        if values.setdefault(name, parsed) != parsed:
            raise PinError(f"--pin {name}", f"is both {values[name]} and {parsed}", "pin it once")
    pins = Pins(**values)
    _contradictions(pins)
    return pins


def _contradictions(pins: Pins) -> None:
    pipeline, virtual, schedule = pins.pipeline, pins.virtual, pins.schedule
    if pipeline == 1 and (virtual or 1) > 1:
        raise PinError("--pin virtual", "one pipeline rank has no virtual stages", "virtual=1 or pipeline of 2 or more")
    if schedule in ("gpipe", "1f1b") and (virtual or 1) > 1:
        raise PinError("--pin virtual", f"schedule {schedule} has one stage a rank", "virtual=1 or interleaved-1f1b")
    if schedule == "zbv" and virtual not in (None, 2):
        raise PinError("--pin virtual", f"schedule zbv has two stages a rank, not {virtual}", "virtual=2")
    if schedule in ("interleaved-zero-bubble", "zbv"):
        if pins.zero == 3:
            raise PinError("--pin zero", f"torch loses gradients of ZeRO 3 under {schedule}", "zero=0, 1 or 2")
        if pins.recompute not in (None, "none"):
            raise PinError("--pin recompute", f"{schedule} would recompute several times", "recompute=none")
    if pins.data is not None and pins.zero_group is not None and pins.data % pins.zero_group:
        raise PinError("--pin zero_group", f"{pins.zero_group} does not divide data={pins.data}", "a divisor of data")
