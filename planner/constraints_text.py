"""Constraints as they are written: ``--pin``, ``--forbid``, ``--headroom`` and the ``constraints`` section of JOB.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.constraints import DEGREES, DOMAINS, LAYERED, NAMES, Combination, Condition, Constraints, Headroom, Relation, Value
from planner.constraints_conflicts import check_contradictions
from planner.fields import MOST
from planner.ir.errors import PinError

_CONDITION = re.compile(
    r"(?:(?P<layers>.*):)?\s*(?P<name>\w+)\s*(?P<relation><=|>=|!=|=|not\s+in\b|in\b)(?P<value>.+)", re.DOTALL
)
_LIMIT = re.compile(r"\s*(?P<relation><=|>=|!=|(?:not\s+)?in(?=\s*\[))(?P<value>.*)", re.DOTALL)
"""A value of a job file that begins with its relation."""
_LIST = re.compile(r"\s*\[(.*)\]\s*", re.DOTALL)
_HEADROOM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B)\s*", re.ASCII)
_UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}, **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside of brackets."""


def parse_pins(texts: Sequence[str]) -> Constraints:
    """Read ``--pin`` texts alone. Raises PinError as :func:`parse_constraints`."""
    return parse_constraints(texts)


def parse_constraints(
    pins: Sequence[str] = (), forbidden: Sequence[str] = (), headroom: str | None = None
) -> Constraints:
    """Read flags. Raises PinError naming what is allowed for unknown names, wrong values and contradictions."""
    constraints = Constraints(
        tuple(dict.fromkeys(parse_condition(text, "--pin") for text in pins)),
        tuple(dict.fromkeys(parse_combination(text, "--forbid") for text in forbidden)),
        None if headroom is None else parse_headroom(headroom, "--headroom"),
    )
    check_contradictions(constraints)
    return constraints


def parse_texts(texts: Sequence[str], where: str) -> Constraints:
    """Read what :attr:`Constraints.written` wrote. Raises PinError naming ``where``."""
    found: dict[str, list[str]] = {"--pin": [], "--forbid": [], "--headroom": []}
    for text in texts:
        flag, _, said = text.partition(" ")
        if flag not in found:
            raise PinError(where, f"{text!r} is no constraint", "--pin, --forbid or --headroom and what follows it")
        found[flag].append(said)
    constraints = Constraints(
        tuple(parse_condition(said, where) for said in found["--pin"]),
        tuple(parse_combination(said, where) for said in found["--forbid"]),
        parse_headroom(found["--headroom"][-1], where) if found["--headroom"] else None,
    )
    check_contradictions(constraints)
    return constraints


def parse_section(section: Mapping[str, Any], where: str) -> Constraints:
    """Read the ``constraints`` of a job file, whose form its schema has checked. ``where``: the file and the section."""
    conditions, combinations, headroom = [], [], None
    for name, value in section.items():
        field = f"{where}.{name}"
        if name == "headroom":
            headroom = parse_headroom(str(value), field)
        elif name == "forbid":
            combinations = [_entries(entry, None, f"{field}.{i}") for i, entry in enumerate(value)]
        elif name == "layers":
            conditions += [c for glob, entry in value.items() for c in _entries(entry, glob, f"{field}.{glob}")]
        else:
            conditions += _entries({name: value}, None, where)
    forbidden = tuple(Combination(tuple(each), f"{where}.forbid.{i}") for i, each in enumerate(combinations))
    return Constraints(tuple(conditions), forbidden, headroom)


def _entries(entry: Mapping[str, Any], layers: str | None, where: str) -> list[Condition]:
    """``{name: value}`` as conditions: a scalar is a value or begins with its relation, a list is a set."""
    found = []
    for name, value in entry.items():
        field = f"{where}.{name}"
        if name not in NAMES:
            raise PinError(field, f"{name!r} is no decision", f"one of {', '.join(NAMES)}")
        if value == []:
            raise PinError(field, "is an empty list", "give the values that are allowed")
        if isinstance(value, list):
            found.append(_condition(name, "in", [_scalar(item).strip() for item in value], layers, field))
            continue
        limit = _LIMIT.fullmatch(_scalar(value))
        relation, said = ("=", _scalar(value)) if limit is None else (_relation(limit["relation"]), limit["value"])
        found.append(_condition(name, relation, _parts(said, relation, name, field), layers, field))
    return found


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_combination(text: str, where: str) -> Combination:
    """``schedule=zbv, tensor>=4``: conditions that may not hold together. Raises PinError."""
    parts: list[str] = []
    for piece in _COMMA.split(text):
        if parts and not _CONDITION.fullmatch(parts[-1]):  # The comma is one of a layer's name.
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return Combination(tuple(parse_condition(part, where) for part in parts), where)


def parse_headroom(text: str, where: str) -> Headroom:
    """``10%`` of the memory, or ``4GiB``. Raises PinError."""
    match = _HEADROOM.fullmatch(text)
    right = "a part such as 10% (less than 100%) or a size such as 4GiB"
    if match is None:
        raise PinError(where, f"{text!r} is no amount of memory", right)
    number = float(match[1])
    if match[2] != "%":
        size = number * _UNITS[match[2]]
        if math.isinf(size):
            raise PinError(where, f"has {len(match[1])} digits", right)
        return Headroom(size_bytes=round(size), where=where)
    if number >= 100:
        raise PinError(where, f"{text!r} leaves no memory", right)
    return Headroom(part=number / 100, where=where)


def parse_condition(text: str, where: str) -> Condition:
    """One condition. Raises PinError."""
    match = _CONDITION.fullmatch(text.strip())
    if match is None or match["name"] not in NAMES:
        right = f"write K=V (or K<=V, K>=V, K in [V,V]) with K one of {', '.join(NAMES)}"
        raise PinError(where, f"{text.strip()!r} pins nothing", right)
    name, relation = match["name"], _relation(match["relation"])
    return _condition(name, relation, _parts(match["value"], relation, name, _field(name, where)), match["layers"], where)


def _relation(text: str) -> Relation:
    return " ".join(text.split())  # type: ignore[return-value]


def _field(name: str, where: str) -> str:
    return f"{where} {name}" if where.startswith("--") else where


def _condition(name: str, relation: Relation, texts: Sequence[str], layers: str | None, where: str) -> Condition:
    """The condition that a decision's value is in ``relation`` to those that ``texts`` write. Raises PinError."""
    field, layers = _field(name, where), None if layers is None else layers.strip()
    if layers is not None and name not in LAYERED:
        raise PinError(field, f"{name} is one for all layers, not for {layers} alone",
                       f"{name} for all layers, or layers of {' or '.join(LAYERED)}")
    if layers == "":
        raise PinError(field, "an empty pattern names no layer", "a glob over their names, for example layers.*")
    if relation in ("<=", ">=") and name in DOMAINS and name != "zero":
        raise PinError(field, f"{name} has no order", f"{name} in [{','.join(_scalar(value) for value in DOMAINS[name])}]")
    found = Condition(name, relation, tuple(_value(name, text, field) for text in texts), layers, where)
    _check_possible(found, field)
    return found


def _parts(text: str, relation: Relation, name: str, field: str) -> list[str]:
    listed = _LIST.fullmatch(text)
    if "in" not in relation:
        if listed is not None:
            raise PinError(field, f"{text.strip()} is several values", f"{name} in {text.strip()}")
        return [text.strip()]
    if listed is None or not listed[1].strip():
        raise PinError(field, f"{text.strip()!r} is no set of values", f"{name} in [V,V]")
    return [part.strip() for part in listed[1].split(",")]


def _value(name: str, text: str, field: str) -> Value:
    if name in DEGREES:
        return _degree(name, text, field)
    for value in DOMAINS[name]:
        if _scalar(value) == text:
            return value
    if name == "sequence_parallel":
        raise PinError(field, f"{text!r} is neither true nor false", f"{name}=true or {name}=false")
    wrong = f"{text!r} is no ZeRO stage" if name == "zero" else f"{text!r} is unknown"
    raise PinError(field, wrong, f"one of {', '.join(map(_scalar, DOMAINS[name]))}")


def _degree(name: str, text: str, field: str) -> int:
    digits = text.lstrip("0")
    if not text.isascii() or not text.isdigit() or not digits:
        raise PinError(field, f"{text!r} is no degree", f"give a positive number, for example {name}=2")
    if len(digits) > len(str(MOST)) or int(digits) > MOST:  # Python makes no number of thousands of digits.
        raise PinError(field, f"has {len(digits)} digits", f"give a positive number, at most {MOST:,}")
    return int(digits)


def _check_possible(condition: Condition, field: str) -> None:
    """Refuse what leaves a decision no value, and degrees of axes that plans do not have yet."""
    name = condition.name
    if name in ("context", "expert") and not condition.admits(1):
        raise PinError(field, f"{condition} excludes 1, and {name} parallelism beyond it is not supported yet", f"{name}=1")
    if name in DOMAINS and not any(condition.admits(value) for value in DOMAINS[name]):
        raise PinError(field, f"{condition} leaves {name} no value", f"one of {', '.join(map(_scalar, DOMAINS[name]))}")
