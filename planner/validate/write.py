"""write_fit: put fitted values into the packaged chips, profiles and engines, each beside the families that it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import hardware_profiles
from hardware_profiles.units import to_si
from planner.validate.fit import Fit
from planner.validate.parameters import CHIP_CLASSES, MACHINES, MATMULS, NETWORKS, Parameter

FOLDER = Path(hardware_profiles.__file__).parent
NAMED = 6
"""Families that a source names; of more it says how many."""
_UNITS = {"ratio": "ratio", "elements": "elements", "s": "s", "ms": "s", "us": "s", "GFLOP": "FLOP"}
_QUANTITY = re.compile(r"^(\s*)([\w.+-]+): (\{value: .*\})\s*$")
_Change = Callable[[float], float]
"""From the number in the file to the new one, both in SI."""


def write_fit(fit: Fit, folder: Path = FOLDER) -> tuple[Path, ...]:
    """Rewrite the files that hold the fit's parameters; returns those that changed."""
    changed: list[Path] = []
    for path in sorted((*folder.glob("chips/*.yaml"), *folder.glob("profiles/*.yaml"), *folder.glob("engines/*.yaml"))):
        before = path.read_text(encoding="utf-8")
        after = before
        content = yaml.safe_load(before)
        for item, value, families in zip(fit.parameters, fit.values, fit.families, strict=True):
            if families:
                source = _source(families, measured=_measured(item, content, fit))
                for place, change in _places(item, value, path, content):
                    after = replaced(after, place, change, source)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return tuple(changed)


def _source(families: tuple[str, ...], *, measured: bool) -> str:
    told = f"{len(families)} families of runs" if len(families) > NAMED else ", ".join(families)
    return f"{'' if measured else 'class estimate, '}fitted to {told} (shardwright validate --fit)"


def _measured(item: Parameter, content: Mapping[str, Any], fit: Fit) -> bool:
    """Whether runs of this very chip are among those that the value was fitted to."""
    return item.kind not in ("chip", "machine") or content.get("name") in fit.chips


def _places(item: Parameter, value: float, path: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, _Change]]:
    """Dotted paths of a parameter in one file, and what becomes of the number there."""
    kind, name = path.parent.name, str(content.get("name"))
    scale = value / item.start

    def given(_: float) -> float:
        return value

    def scaled(old: float) -> float:
        return old * scale

    if kind == "chips" and item.kind == "chip" and name in CHIP_CLASSES[item.subject]:
        if item.field == "attention":
            yield from (("attention_forward", scaled), ("attention_backward", scaled))
        elif item.field == "attention_portable":
            yield item.field, given
        else:
            dtypes = (*MATMULS[item.field], *(("float8",) if item.subject.startswith("tpu") else ()))
            for dtype in dtypes:
                yield from ((f"gemm.{dtype}.maximum", scaled), (f"gemm.{dtype}.half_work", scaled))
    elif kind == "chips" and item.kind == "machine" and any(name in CHIP_CLASSES[part] for part in MACHINES[item.subject]):
        if item.field == "half_dim":
            yield from ((f"gemm.{dtype}.half_dim", given) for dtype in content["gemm"])
        else:
            yield item.field, given
    elif kind in ("chips", "profiles") and item.kind == "link":
        for level, link in content.get("links", {}).items():
            if link.get("technology") in NETWORKS[item.subject]:
                yield f"links.{level}.efficiency", given
    elif kind == "engines" and item.kind == "engine" and name == item.subject.partition("+")[0]:
        recipe = item.subject.partition("+")[2]
        yield (f"recipes.{recipe}.numbers.{item.field}" if recipe else f"numbers.{item.field}"), given


def replaced(text: str, place: str, change: _Change, source: str) -> str:
    """``text`` with the quantity at a dotted path changed; a text without it stays as it is."""
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
            unit = to_si(1.0, old["unit"], _UNITS[old["unit"]], place)
            value = change(old["value"] * unit) / unit
            lines[index] = (
                f'{quantity[1]}{quantity[2]}: {{value: {value:.4g}, unit: {old["unit"]}, kind: fitted, source: "{source}"}}'
            )
    return "\n".join(lines)
