"""Every number of a cluster file has bounds on both sides; what lies outside is refused by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml

from cost_models.compute import attention_s, gemm_s, memory_bound_s
from hardware_profiles import ProfileFormatError, cluster_from_yaml, cluster_to_yaml, resolve_cluster
from hardware_profiles.fields import FIELDS, field_of
from hardware_profiles.reader import build_cluster, read_document
from hardware_profiles.schema import ChipDocument, CurveDocument, LinkDocument


def full() -> dict[str, Any]:
    """A profile that gives every number that there is (``half_message`` beside ``start`` would be one too many)."""
    cluster = resolve_cluster("local-cpu:1x2")
    chip = replace(cluster.chip, attention_half_head=16.0, attention_tile=512, memory_irregular=0.5, host_s=1e-6)
    content = yaml.safe_load(cluster_to_yaml(replace(cluster, chip=chip)))
    assert isinstance(content, dict)
    return content


def numbers(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, inner in content.items():
        at = f"{path}.{key}" if path else key
        if isinstance(inner, dict):
            yield from [(at, inner)] if "value" in inner else numbers(inner, at)


FULL = full()
PATHS = [path for path, _ in numbers(FULL)]


def given(path: str, value: float) -> None:
    """Read the profile whose number at ``path`` is ``value``, in its SI unit."""
    content = deepcopy(FULL)
    dict(numbers(content))[path]["value"] = value
    read_document(content, "mine.yaml")


def test_every_number_of_the_schema_has_bounds() -> None:
    told = {
        name for part in (ChipDocument, CurveDocument, LinkDocument) for name, field in part.model_fields.items()
        if "Quantity" in str(field.annotation)
    }
    assert told == FIELDS.keys()
    assert {field_of(path) for path in PATHS} == FIELDS.keys() - {"half_message"}


@pytest.mark.parametrize("name", ["peak", "functions", "chip", "chip.peak", "latency"])
def test_a_level_of_the_network_may_be_called_as_a_field_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    rack = "technology: NVLink, size: 16, bandwidth: {value: 50, unit: GB/s, kind: given, source: abc}, "
    rack += "latency: {value: 1, unit: us, kind: given, source: abc}, "
    rack += "efficiency: {value: 0.5, unit: ratio, kind: given, source: abc}, "
    rack += "start: {value: 1, unit: us, kind: given, source: abc}"
    path.write_text(f"base: dgx-a100-80gb\nnodes: 8\nlinks: {{{name}: {{{rack}}}}}\n")
    cluster = resolve_cluster(str(path))
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 8), (name, 16), ("fabric", 64)]
    assert cluster.levels[1].link.bandwidth_bytes_s == 50e9
    assert cluster_from_yaml(cluster_to_yaml(cluster)) == cluster


@pytest.mark.parametrize("path", PATHS)
def test_a_number_within_its_bounds_is_taken_and_one_beyond_them_is_named(path: str) -> None:
    field = FIELDS[field_of(path)]
    for value in (field.least, field.most):
        given(path, value)
    outside = [2 * field.most, 1e300] + ([field.least / 2, 1e-320, 5e-324] if field.least > 0 else [])
    for value in outside:
        with pytest.raises(ProfileFormatError) as error:
            given(path, value)
        assert error.value.where == f"mine.yaml: {path}"


def test_what_is_told_of_a_number_out_of_bounds() -> None:
    with pytest.raises(ProfileFormatError) as error:
        given("chip.memory_bandwidth", 1e-320)
    assert error.value.wrong == "9.99989e-321 B/s is too small"
    assert error.value.right == "give the number of one device, from 1000 to 1e+18 B/s"


def test_a_half_message_is_bounded_by_what_a_call_may_take_to_start(tmp_path: Path) -> None:
    """A resolved cluster says the start of a call in seconds, and is read again beside a plan."""
    path = tmp_path / "mine.yaml"
    text = "base: dgx-a100-80gb\nnodes: 2\nlinks: {{fabric: {{efficiency: {{value: 1}}, "
    text += "half_message: {{value: {}, unit: GB}}}}}}\n"
    path.write_text(text.format(25 * 100))
    cluster = resolve_cluster(str(path))
    assert cluster.levels[1].link.start_s == 100 and cluster_from_yaml(cluster_to_yaml(cluster)) == cluster
    path.write_text(text.format(25 * 101))
    with pytest.raises(ProfileFormatError) as error:
        resolve_cluster(str(path))
    assert (error.value.where, error.value.wrong) == (f"{path}: links.fabric.half_message", "2525 GB take the link 101 s")


@pytest.mark.parametrize("field", ["devices_per_node", "host_devices", "size"])
def test_counts_of_devices_have_an_end(field: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    change = "links: {fabric: {size: 16777224}}" if field == "size" else f"{field}: 16777224"
    path.write_text(f"base: dgx-a100-80gb\nnodes: 1\n{change}\n")
    with pytest.raises(ProfileFormatError, match=f"{field}: is 16777224; input should be less than or equal to 16777216"):
        resolve_cluster(str(path))


def test_a_chip_at_its_slow_bounds_computes_in_seconds_that_can_be_added() -> None:
    content = deepcopy(FULL)
    for path, number in numbers(content):
        field = FIELDS[field_of(path)]
        number["value"] = field.most if field.least == 0 or field.whole else field.least
    cluster = build_cluster(read_document(content, "mine.yaml"), 1, 2)
    assert cluster_from_yaml(cluster_to_yaml(cluster)) == cluster
    chip = cluster.chip
    size = 2**17
    products = gemm_s(chip, size, size, size, 2**20, "float32")
    attention = attention_s(chip, 2**20, 128, size, size, 128, causal=True, dtype="float32", backward=True)
    streamed = memory_bound_s(chip, 2.0**60)
    assert all(isfinite(seconds) and 0 < seconds < 1e60 for seconds in (products, attention, streamed))
