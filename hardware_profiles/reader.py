"""From text to :class:`Cluster` and back: YAML, units, overrides."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hardware_profiles.chip import Chip, EfficiencyCurve
from hardware_profiles.cluster import Cluster, Level, Link
from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.fields import FIELDS, check_quantity, in_si
from hardware_profiles.files import text_of
from hardware_profiles.levels import check_levels, check_order, host_part, inwards_out, links_of_part, profile_of_part, reached
from hardware_profiles.problems import first_problem
from hardware_profiles.schema import ChipDocument, CurveDocument, LinkDocument, ProfileDocument, Quantity
from hardware_profiles.units import to_si
from hardware_profiles.yaml_text import load_core, parse_mapping


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package, sorted."""
    folder = resources.files("hardware_profiles") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def profile_text(name: str, where: str = "cluster") -> str:
    """YAML of a packaged profile; an unknown name raises, naming ``where`` it stands and listing the known ones."""
    if name not in profile_names():
        raise ProfileFormatError(where, f"unknown profile {name!r}", f"use one of {', '.join(profile_names())}")
    return (resources.files("hardware_profiles") / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")


def profile_content(name: str, where: str = "cluster") -> dict[str, Any]:
    """The mapping of a packaged profile, its chip filled in. Raises as :func:`profile_text`."""
    return with_chip(parse_yaml(profile_text(name, where), name), name)


def with_chip(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Where a profile's ``chip`` is the name of a file in ``chips/``: that chip, and its links inside the profile's own."""
    chip = content.get("chip")
    if not isinstance(chip, str):
        return dict(content)
    folder = resources.files("hardware_profiles") / "chips"
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    if chip not in names:
        raise ProfileFormatError(f"{where}: chip", f"unknown chip {chip!r}", f"use one of {', '.join(names)}")
    found = parse_yaml((folder / f"{chip}.yaml").read_text(encoding="utf-8"), chip)
    links = found.pop("links", {})
    links = links_of_part(links, links.get("node", {}).get("size"), content.get("devices_per_node"))
    own = content.get("links", {})
    return {**content, "chip": found, "links": merge(_starts_kept(links, own), own) if isinstance(own, Mapping) else own}


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A YAML mapping, or :class:`ProfileFormatError` that names ``where`` and the line."""
    try:
        return copy.deepcopy(_parsed(text))
    except ValueError as error:
        raise ProfileFormatError(where, str(error), "write a mapping of fields") from error


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any]:
    """What a text holds, for nobody to change: to parse it again takes ten times as long as to copy this."""
    return parse_mapping(text, load_core)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, mapping by mapping; anything else replaces."""
    merged = dict(base)
    for key, change in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, change) if isinstance(old, Mapping) and isinstance(change, Mapping) else change
    return merged


def _starts_kept(links: Mapping[str, Any], changes: object) -> dict[str, Any]:
    """Packaged links to lay ``changes`` over. One that is given another rate starts its calls as before, unless
    ``half_message`` is given with it: what was said of the old rate says another start of the new one."""
    changed = changes if isinstance(changes, Mapping) else {}
    return {name: _with_start(link, name) if _changes_rate(changed.get(name)) else link for name, link in links.items()}


def _changes_rate(change: object) -> bool:
    return isinstance(change, Mapping) and "half_message" not in change and bool(
        change.keys() & {"bandwidth", "efficiency", "start"}
    )


def _with_start(link: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A packaged link with the start of a call in the place of its ``half_message``."""
    half, bandwidth, efficiency = (
        to_si(link[field]["value"], link[field]["unit"], FIELDS[field].dimension, f"links.{name}.{field}")
        for field in ("half_message", "bandwidth", "efficiency")
    )
    start = {**link["half_message"], "value": half / (bandwidth * efficiency) * 1e6, "unit": "us"}
    return {field: number for field, number in link.items() if field != "half_message"} | {"start": start}


def read_document(content: Mapping[str, Any], where: str) -> ProfileDocument:
    """Validate a profile's mapping; the first thing wrong is named by its field, also a unit or a share above 1."""
    try:
        document = ProfileDocument.model_validate(_floats(content))
    except ValidationError as error:
        field, wrong, right = first_problem(error)
        raise ProfileFormatError(f"{where}: {field}", wrong, f"{right} (see `shardwright hardware`)") from error
    for path, quantity in quantities(document):
        check_quantity(path, quantity, where)
    for dtype in document.chip.gemm.keys() ^ document.chip.peak.keys():
        raise ProfileFormatError(f"{where}: chip", f"{dtype} is not in both peak and gemm", "give both or neither")
    if document.chip.training_dtype not in document.chip.peak:
        wrong = f"the chip has no rate for {document.chip.training_dtype}"
        raise ProfileFormatError(f"{where}: chip.training_dtype", wrong, f"one of {', '.join(document.chip.peak)}")
    check_levels(document, where)
    for name, link in document.links.items():
        if (link.start is None) == (link.half_message is None):
            wrong = "is given beside half_message" if link.start is not None else "is missing"
            raise ProfileFormatError(f"{where}: links.{name}.start", wrong, "give either start or half_message")
        _check_start(name, link, where)
    return document


def _check_start(name: str, link: LinkDocument, where: str) -> None:
    """Refuse a ``half_message`` that takes its link longer than any call may need to start."""
    at = f"links.{name}"
    if link.half_message is None:
        return
    half, bandwidth, efficiency = (
        in_si(f"{at}.{field}", quantity)
        for field, quantity in (
            ("half_message", link.half_message), ("bandwidth", link.bandwidth), ("efficiency", link.efficiency)
        )
    )
    start_s = half / (bandwidth * efficiency)
    if start_s > FIELDS["start"].most:
        wrong = f"{link.half_message.value:g} {link.half_message.unit} take the link {start_s:g} s"
        right = f"give what it sends in {FIELDS['start'].most:g} s at most"
        raise ProfileFormatError(f"{where}: {at}.half_message", wrong, right)


def _floats(content: Any) -> Any:
    """YAML's ``80`` is an integer; a quantity's value is a float."""
    if not isinstance(content, Mapping):
        return content
    return {key: _float(inner) if key == "value" and type(inner) is int else _floats(inner) for key, inner in content.items()}


def _float(number: int) -> float:
    return float(number) if abs(number) < 2**1000 else math.inf


def quantities(document: ProfileDocument) -> Iterator[tuple[str, Quantity]]:
    """(dotted path, quantity) of every number in a profile, in the file's order."""

    def walk(path: str, part: object) -> Iterator[tuple[str, Quantity]]:
        if isinstance(part, Quantity):
            yield path, part
        elif isinstance(part, dict):
            for key, inner in part.items():
                yield from walk(f"{path}.{key}", inner)
        elif isinstance(part, ChipDocument | CurveDocument | LinkDocument):
            for name in type(part).model_fields:
                yield from walk(f"{path}.{name}", getattr(part, name))

    yield from walk("chip", document.chip)
    yield from walk("links", document.links)


def build_cluster(document: ProfileDocument, nodes: int, devices_per_node: int) -> Cluster:
    """The cluster of ``nodes`` x ``devices_per_node`` chips. Raises ProfileFormatError where links do not reach them all."""
    si = {path: in_si(path, q) for path, q in quantities(document)}
    network: list[Level] = []
    for name, link in inwards_out(document.links):
        at = f"links.{name}"
        rate = si[f"{at}.bandwidth"] * si[f"{at}.efficiency"]
        spec = Link(
            name=link.technology,
            bandwidth_bytes_s=si[f"{at}.bandwidth"],
            latency_s=si[f"{at}.latency"],
            efficiency=si[f"{at}.efficiency"],
            start_s=si[f"{at}.start"] if link.start is not None else si[f"{at}.half_message"] / rate,
            peer_bytes_s=si.get(f"{at}.peer_bandwidth", si[f"{at}.bandwidth"]),
            reduce_scatter=link.reduce_scatter,
            torus=link.torus,
            send=si.get(f"{at}.send", 1.0),
        )
        network.append(Level(name, link.size or nodes * devices_per_node, spec, link.size))
    levels, beyond = reached(network, document.devices_per_node, nodes, devices_per_node, document.name)
    sources = {path: f"{q.kind}: {q.source}" for path, q in quantities(document)}
    hosts = host_part(document.host_devices, devices_per_node)
    return Cluster(document.name, _build_chip(document, si), levels, nodes, devices_per_node, hosts, beyond, sources)


def _build_chip(document: ProfileDocument, si: Mapping[str, float]) -> Chip:
    curves = {
        str(dtype): EfficiencyCurve(
            maximum=si[f"chip.gemm.{dtype}.maximum"],
            half_work_flops=si[f"chip.gemm.{dtype}.half_work"],
            half_dim=si[f"chip.gemm.{dtype}.half_dim"],
            tile=round(si[f"chip.gemm.{dtype}.tile"]),
        )
        for dtype in document.chip.gemm
    }
    return Chip(
        name=document.chip.name,
        memory_bytes=round(si["chip.memory"]),
        memory_bandwidth=si["chip.memory_bandwidth"],
        peak_flops={str(dtype): si[f"chip.peak.{dtype}"] for dtype in document.chip.peak},
        gemm=curves,
        attention_forward=si["chip.attention_forward"],
        attention_backward=si["chip.attention_backward"],
        memory_efficiency=si["chip.memory_efficiency"],
        memory_half_bytes=si["chip.memory_half"],
        launch_s=si["chip.launch"],
        reserve_bytes=round(si["chip.reserve"]),
        training_dtype=document.chip.training_dtype,
        attention_half_head=si.get("chip.attention_half_head"),
        attention_tile=round(si.get("chip.attention_tile", 1)),
        hook_s=si.get("chip.hook"),
        host_s=si.get("chip.host"),
        functions={name: si[f"chip.functions.{name}"] for name in document.chip.functions},
        attention_portable=si.get("chip.attention_portable", 1.0),
        memory_irregular=si.get("chip.memory_irregular", 1.0),
        runs_torch=document.chip.runs_torch,
    )


def _with_origin(base: Mapping[str, Any], changes: Mapping[str, Any], file: str) -> dict[str, Any]:
    """``changes`` of a base, whose numbers do not keep the kind and the source of those that they replace: unless they say
    their own, ``file`` gives them."""
    found = dict(changes)
    for key, change in changes.items():
        if isinstance(base.get(key), Mapping) and isinstance(change, Mapping):
            found[key] = _with_origin(base[key], change, file)
    is_number = "value" in base and ("value" in changes or "unit" in changes)
    return {"kind": "given", "source": file, **found} if is_number else found


def read_file(path: Path) -> tuple[ProfileDocument, str]:
    """A YAML of the user's own: a whole profile, or ``base:`` with changes. Returns it and its name for errors."""
    where = str(path)
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
        raise ProfileFormatError(where, wrong, "give a readable YAML file") from error
    content = parse_yaml(text, where)
    if "base" in content:
        return _changed(content.pop("base"), content, path), where
    return read_document(with_chip(content, where), where), where


def _changed(base: object, changes: Mapping[str, Any], path: Path) -> ProfileDocument:
    """The packaged profile ``base`` under the changes that a file makes, called as the file is."""
    where = str(path)
    if not isinstance(base, str):
        raise ProfileFormatError(f"{where}: base", f"{base!r} is no name", f"use one of {', '.join(profile_names())}")
    content = parse_yaml(profile_text(base, f"{where}: base"), base)
    if isinstance(changes.get("chip"), str):
        # Named in the place of the base's own: with the links of a chip its base would keep those of the one that it had.
        content["chip"], changes = changes["chip"], {key: change for key, change in changes.items() if key != "chip"}
    content = with_chip(content, where)
    profile = profile_of_part({**content, "name": path.stem}, changes.get("devices_per_node", content["devices_per_node"]))
    profile["links"] = _starts_kept(profile["links"], changes.get("links"))
    document = read_document(merge(profile, _with_origin(profile, changes, path.name)), where)
    check_order(document, profile["links"], base, where)
    return document
