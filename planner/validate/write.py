"""write_fit: put fitted values into the packaged chips, profiles and engines, each beside the families that it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import hardware_profiles
from hardware_profiles.units import to_si
from planner.ir.replacing import replacing
from planner.validate.fit import Fit
from planner.validate.parameters import (
    BACKWARD_ATTENTION,
    CAPPED,
    CHIP_CLASSES,
    CLOCKED,
    MACHINES,
    NETWORKS,
    Parameter,
    clock_of,
    half_work,
    product_dtypes,
)

FOLDER = Path(hardware_profiles.__file__).parent
NAMED = 6
"""Families that a source names; of more it says how many."""
_UNITS = {"ratio": "ratio", "elements": "elements", "s": "s", "ms": "s", "us": "s", "GFLOP": "FLOP"}
_QUANTITY = re.compile(r"^(\s*)([\w.+-]+): (\{value: .*\})\s*$")


def write_fit(fit: Fit, folder: Path = FOLDER, *, alone: bool = False) -> tuple[Path, ...]:
    """Rewrite the files that hold the fit's parameters; returns those that changed. ``alone``: only what the runs say
    something of, of the chips that they were on; else others of their class get the same numbers. Raises OSError."""
    changed: dict[Path, str] = {}
    for path in sorted((*folder.glob("chips/*.yaml"), *folder.glob("profiles/*.yaml"), *folder.glob("engines/*.yaml"))):
        before = path.read_text(encoding="utf-8")
        after = before
        content = yaml.safe_load(before)
        if alone and _chip(path, content) not in (None, *fit.chips):
            continue
        clock = clock_of(str(content.get("name")), dict(zip(fit.parameters, fit.values, strict=True)))
        for item, value, families in zip(fit.parameters, fit.values, fit.families, strict=True):
            if alone and not families:
                continue
            slowed = item.kind == "chip" and item.field in CLOCKED and clock < 1.0
            told = tuple(sorted({*families, *_of_clock(content, fit)})) if slowed else families
            source = _source(told, measured=_measured(item, content, fit))
            if slowed:
                source = f"its class's at {clock:.3f} of the clock, limited power; {source}"
            for place, number in _places(item, value * (clock if slowed else 1.0), path, content):
                after = replaced(after, place, number, source)
        if after != before:
            changed[path] = after
    with replacing() as files:
        for path, after in changed.items():
            files.write(path, after)
    return tuple(changed)


def _chip(path: Path, content: Mapping[str, Any]) -> str | None:
    """The chip that a file is of; an engine is of none."""
    if path.parent.name == "engines":
        return None
    chip = content["chip"] if path.parent.name == "profiles" else content
    if isinstance(chip, str):
        chip = yaml.safe_load((path.parent.parent / "chips" / f"{chip}.yaml").read_text(encoding="utf-8"))
    return str(chip["name"])


def _source(families: tuple[str, ...], *, measured: bool) -> str:
    if not families:
        return "class estimate: no run tells it apart; where its like were fitted to (shardwright validate --fit)"
    told = f"{len(families)} families of runs" if len(families) > NAMED else ", ".join(families)
    return f"{'' if measured else 'class estimate, '}fitted to {told} (shardwright validate --fit)"


def _of_clock(content: Mapping[str, Any], fit: Fit) -> tuple[str, ...]:
    """Families that a limited clock comes from."""
    pairs = zip(fit.parameters, fit.families, strict=True)
    return next((told for item, told in pairs if item.kind == "clock" and content.get("name") in CAPPED[item.subject]), ())


def _measured(item: Parameter, content: Mapping[str, Any], fit: Fit) -> bool:
    """Whether runs of this very chip are among those that the value was fitted to."""
    return item.kind not in ("chip", "machine") or content.get("name") in fit.chips


def _places(item: Parameter, value: float, path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Dotted paths of a parameter in one file, and the number there in SI."""
    kind, name = path.parent.name, str(content.get("name"))
    if kind == "chips" and item.kind == "chip" and name in CHIP_CLASSES[item.subject]:
        yield from _of_chip(item, value, content)
    elif kind == "chips" and item.kind == "machine" and any(name in CHIP_CLASSES[part] for part in MACHINES[item.subject]):
        if item.field == "half_dim":
            yield from ((f"gemm.{dtype}.half_dim", value) for dtype in content["gemm"])
        else:
            yield item.field, value
    elif kind in ("chips", "profiles") and item.kind == "link":
        for level, link in content.get("links", {}).items():
            if link.get("technology") in NETWORKS[item.subject]:
                yield f"links.{level}.efficiency", value
    elif kind == "engines" and item.kind == "engine" and name == item.subject.partition("+")[0]:
        recipe = item.subject.partition("+")[2]
        yield (f"recipes.{recipe}.numbers.{item.field}" if recipe else f"numbers.{item.field}"), value


def _of_chip(item: Parameter, value: float, content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if item.field == "attention":
        yield from (("attention_forward", value), ("attention_backward", value * BACKWARD_ATTENTION))
    elif item.field == "attention_portable":
        yield item.field, value
    else:
        for dtype in (name for name in product_dtypes(item) if name in content["gemm"]):
            stated = content["peak"][dtype]
            peak = to_si(stated["value"], stated["unit"], "FLOP/s", f"peak.{dtype}")
            yield f"gemm.{dtype}.maximum", value
            yield f"gemm.{dtype}.half_work", half_work(item.subject, peak, value)


def replaced(text: str, place: str, value: float, source: str) -> str:
    """``text`` with the quantity at a dotted path set to a value in SI; a text without it stays as it is."""
    lines = text.split("\n")
    stack: list[tuple[int, str]] = []
    for index, line in enumerate(lines):
        key = re.match(r"^(\s*)([\w.+-]+):", line)
        if key is None:
            continue
        indent = len(key[1])
        stack = [entry for entry in stack if entry[0] < indent] + [(indent, key[2])]
        quantity = _QUANTITY.match(line)
        if quantity is not None and ".".join(name for _, name in stack) == place:
            old = yaml.safe_load(quantity[3])
            number = value / to_si(1.0, old["unit"], _UNITS[old["unit"]], place)
            lines[index] = (
                f'{quantity[1]}{quantity[2]}: {{value: {number:.4g}, unit: {old["unit"]}, kind: fitted, source: "{source}"}}'
            )
    return "\n".join(lines)
