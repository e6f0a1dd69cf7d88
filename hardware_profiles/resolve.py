"""What ``--cluster`` means: ``PROFILE:NODES``, ``PROFILE:NODESxDEVICES``, or a YAML file of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Cluster
from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.reader import (
    build_cluster,
    parse_yaml,
    profile_content,
    profile_text,
    quantities,
    read_document,
    read_file,
)
from hardware_profiles.schema import ProfileDocument
from hardware_profiles.yaml_text import dump

PROFILE_SUFFIXES = (".yaml", ".yml")
"""By which a file of the user's own is told from the name of a packaged profile."""
_FORM = "write PROFILE:NODES, PROFILE:NODESxDEVICES or a YAML file"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One number of a profile, for a table."""

    field: str
    value: float
    unit: str
    kind: str
    source: str


def resolve_cluster(spec: str) -> Cluster:
    """The cluster that ``spec`` names. Errors (:class:`ProfileFormatError`): an unknown profile (lists the known ones),
    a node count that is no positive number, more devices than a node has, a file that is not a profile."""
    head, _, counts = spec.rpartition(":") if re.search(r":[^/:]*$", spec) else (spec, "", "")
    if head.endswith(PROFILE_SUFFIXES):
        document, where = read_file(Path(head))
    else:
        if not counts and ":" not in spec:
            profile_text(spec)
            raise ProfileFormatError("cluster", f"{spec!r} does not say how many nodes", _FORM)
        document, where = read_document(profile_content(head), head), "cluster"
    nodes, devices = _counts(counts, spec) if head != spec else (_nodes(document, where), None)
    devices = document.devices_per_node if devices is None else devices
    if devices > document.devices_per_node:
        raise ProfileFormatError(
            "cluster",
            f"{devices} devices a node in {spec!r}",
            f"a node of {document.name} has {document.devices_per_node}",
        )
    return build_cluster(document, nodes, devices)


def _counts(counts: str, spec: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"([0-9]{1,20})(?:x([0-9]{1,20}))?", counts)
    if found is None or int(found[1]) < 1 or (found[2] is not None and int(found[2]) < 1):
        raise ProfileFormatError("cluster", f"{counts!r} in {spec!r} is no positive number of nodes", _FORM)
    return int(found[1]), None if found[2] is None else int(found[2])


def describe(name: str) -> tuple[ProfileRow, ...]:
    """Every number of a packaged profile, or of a profile's YAML file, in the units of its file."""
    if name.endswith(PROFILE_SUFFIXES):
        document, _ = read_file(Path(name))
    else:
        document = read_document(profile_content(name, "PROFILE"), name)
    return tuple(ProfileRow(path, q.value, q.unit, q.kind, q.source) for path, q in quantities(document))


def cluster_to_yaml(cluster: Cluster) -> str:
    """A resolved cluster as a profile in SI units; :func:`cluster_from_yaml` gives the same cluster back, exactly."""
    chip, sources = cluster.chip, cluster.sources

    def quantity(path: str, value: float, unit: str) -> dict[str, object]:
        kind, _, source = sources.get(path, "fitted: given by the caller").partition(": ")
        return {"value": float(value), "unit": unit, "kind": kind, "source": source}

    def curve(dtype: str) -> dict[str, object]:
        at, shape = f"chip.gemm.{dtype}", chip.gemm[dtype]
        return {
            "maximum": quantity(f"{at}.maximum", shape.maximum, "ratio"),
            "half_work": quantity(f"{at}.half_work", shape.half_work_flops, "FLOP"),
            "half_dim": quantity(f"{at}.half_dim", shape.half_dim, "elements"),
            "tile": quantity(f"{at}.tile", shape.tile, "elements"),
        }

    links = {
        level.name: {
            "technology": level.link.name,
            "size": level.limit,
            "bandwidth": quantity(f"links.{level.name}.bandwidth", level.link.bandwidth_bytes_s, "B/s"),
            "peer_bandwidth": quantity(f"links.{level.name}.peer_bandwidth", level.link.peer_bytes_s, "B/s"),
            "latency": quantity(f"links.{level.name}.latency", level.link.latency_s, "s"),
            "efficiency": quantity(f"links.{level.name}.efficiency", level.link.efficiency, "ratio"),
            "start": quantity(_start_field(level.name, sources), level.link.start_s, "s"),
            "send": quantity(f"links.{level.name}.send", level.link.send, "ratio"),
            "reduce_scatter": level.link.reduce_scatter,
            "torus": level.link.torus,
        }
        for level in (*cluster.levels, *cluster.beyond)
    }
    content = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        **({} if cluster.host_devices is None else {"host_devices": cluster.host_devices}),
        "chip": {
            "name": chip.name,
            **({} if chip.runs_torch else {"runs_torch": False}),
            "memory": quantity("chip.memory", chip.memory_bytes, "B"),
            "memory_bandwidth": quantity("chip.memory_bandwidth", chip.memory_bandwidth, "B/s"),
            "training_dtype": chip.training_dtype,
            "peak": {dtype: quantity(f"chip.peak.{dtype}", peak, "FLOP/s") for dtype, peak in chip.peak_flops.items()},
            "gemm": {dtype: curve(dtype) for dtype in chip.gemm},
            "attention_forward": quantity("chip.attention_forward", chip.attention_forward, "ratio"),
            "attention_backward": quantity("chip.attention_backward", chip.attention_backward, "ratio"),
            "attention_portable": quantity("chip.attention_portable", chip.attention_portable, "ratio"),
            "memory_efficiency": quantity("chip.memory_efficiency", chip.memory_efficiency, "ratio"),
            "memory_half": quantity("chip.memory_half", chip.memory_half_bytes, "B"),
            "launch": quantity("chip.launch", chip.launch_s, "s"),
            "reserve": quantity("chip.reserve", chip.reserve_bytes, "B"),
            **_seldom_given(chip, quantity),
        },
        "links": links,
    }
    return dump(content, width=120)


def _start_field(level: str, sources: Mapping[str, str]) -> str:
    """Where a profile said what starting a call of a level takes."""
    start = f"links.{level}.start"
    return start if start in sources else f"links.{level}.half_message"


def _seldom_given(chip: Chip, quantity: Callable[[str, float, str], dict[str, object]]) -> dict[str, object]:
    """The numbers that a profile may leave out, where this one has them."""
    numbers: dict[str, object] = {}
    if chip.attention_half_head is not None:
        numbers["attention_half_head"] = quantity("chip.attention_half_head", chip.attention_half_head, "elements")
    if chip.attention_tile > 1:
        numbers["attention_tile"] = quantity("chip.attention_tile", chip.attention_tile, "elements")
    if chip.memory_irregular < 1:
        numbers["memory_irregular"] = quantity("chip.memory_irregular", chip.memory_irregular, "ratio")
    if chip.hook_s is not None:
        numbers["hook"] = quantity("chip.hook", chip.hook_s, "s")
    if chip.host_s is not None:
        numbers["host"] = quantity("chip.host", chip.host_s, "s")
    if chip.functions:
        numbers["functions"] = {
            name: quantity(f"chip.functions.{name}", seconds, "s/element") for name, seconds in chip.functions.items()
        }
    return numbers


def cluster_from_yaml(text: str, where: str = "cluster") -> Cluster:
    """The cluster that :func:`cluster_to_yaml` wrote."""
    document = read_document(parse_yaml(text, where), where)
    return build_cluster(document, _nodes(document, where), document.devices_per_node)


def _nodes(document: ProfileDocument, where: str) -> int:
    if document.nodes is None:
        raise ProfileFormatError(where, "does not say how many nodes", "add `nodes: N`, or write FILE:NODES")
    return document.nodes
