"""Profiles are read strictly, in SI, and a resolved cluster survives the file beside a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import (
    ProfileFormatError,
    cluster_from_yaml,
    cluster_to_yaml,
    describe,
    profile_names,
    resolve_cluster,
)

PROFILES = (
    "aws-p3-16xlarge", "b200-capped", "dgx-2", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-b200", "dgx-b300", "dgx-h100", "dgx-h200",
    "dgx-v100", "gb200-nvl72", "gb300-nvl72", "grand-teton-h100", "hgx-a800", "hgx-h800", "jean-zay-a100", "jean-zay-v100",
    "local-cpu", "mi250x", "mi300x", "mi355x", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x",
)  # fmt: skip


def test_every_promised_profile_is_there() -> None:
    assert profile_names() == PROFILES


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_a_resolved_cluster_round_trips_exactly(name: str) -> None:
    cluster = resolve_cluster(f"{name}:3")
    again = cluster_from_yaml(cluster_to_yaml(cluster))
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
    kept = again.sources.keys() & cluster.sources.keys()
    assert {path: again.sources[path] for path in kept} == {path: cluster.sources[path] for path in kept}
    assert not {path for path in cluster.sources if path.startswith("chip.")} - kept


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_has_a_kind_and_a_source(name: str) -> None:
    rows = describe(name)
    assert len(rows) > 15
    assert {row.kind for row in rows} <= {"datasheet", "measured", "fitted"}
    assert all(len(row.source) > 3 for row in rows)


@pytest.mark.parametrize("name", PROFILES)
def test_numbers_are_of_the_right_magnitude(name: str) -> None:
    cluster = resolve_cluster(f"{name}:1")
    chip = cluster.chip
    assert chip.reserve_bytes < chip.memory_bytes // 4
    assert all(1e10 < peak < 2e16 for peak in chip.peak_flops.values())
    assert 1e10 < chip.memory_bandwidth < 1e13
    assert all(level.link.rate(2) < chip.memory_bandwidth for level in cluster.levels)


def test_datasheet_numbers_are_si() -> None:
    cluster = resolve_cluster("dgx-a100-80gb:4")
    assert cluster.devices == 32
    assert cluster.chip.peak("bfloat16") == 312e12
    assert cluster.chip.memory_bandwidth == pytest.approx(2.039e12)
    node, fabric = cluster.levels
    assert (node.size, fabric.size) == (8, 32)
    assert fabric.link.bandwidth_bytes_s == 25e9
    assert node.link.bandwidth_bytes_s == 300e9


def test_levels_follow_the_devices_used() -> None:
    assert [level.size for level in resolve_cluster("dgx-h100:2x4").levels] == [4, 8]
    assert [level.size for level in resolve_cluster("dgx-h100:1").levels] == [8]
    assert [level.size for level in resolve_cluster("dgx-h100:4x1").levels] == [1, 4]
    assert [level.size for level in resolve_cluster("gb200-nvl72:2").levels] == [72, 144]
    assert [level.size for level in resolve_cluster("tpu-v4:64").levels] == [16, 256]
    assert resolve_cluster("local-cpu:1x4").devices == 4


def test_the_fingerprint_follows_the_numbers_not_the_sources() -> None:
    assert resolve_cluster("dgx-h100:1").fingerprint != resolve_cluster("dgx-h100:2").fingerprint
    text = cluster_to_yaml(resolve_cluster("dgx-h100:1"))
    assert cluster_from_yaml(text.replace("NVIDIA", "vendor")).fingerprint == resolve_cluster("dgx-h100:1").fingerprint


def test_tpus_run_no_programs_of_torch_and_every_other_chip_does() -> None:
    for name in PROFILES:
        chip = resolve_cluster(f"{name}:1").chip
        assert chip.runs_torch is not name.startswith("tpu-"), name
    cluster = resolve_cluster("tpu-v4:1")
    assert replace(cluster, chip=replace(cluster.chip, runs_torch=True)).fingerprint == cluster.fingerprint


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dgx-z100:1", "unknown profile 'dgx-z100'; use one of aws-p3-16xlarge"),
        ("dgx-z100", "unknown profile 'dgx-z100'; use one of aws-p3-16xlarge"),
        ("dgx-h100", "does not say how many nodes; write PROFILE:NODES"),
        ("dgx-h100:0", "no positive number of nodes"),
        ("dgx-h100:-2", "no positive number of nodes"),
        ("dgx-h100:two", "no positive number of nodes"),
        ("dgx-h100:٣", "no positive number of nodes"),
        ("dgx-h100:2x٣", "no positive number of nodes"),
        (f"dgx-h100:{'9' * 5000}", "no positive number of nodes"),
        ("dgx-h100:2x0", "no positive number of nodes"),
        ("dgx-h100:", "no positive number of nodes"),
        ("dgx-h100:1x9", "9 devices a node in 'dgx-h100:1x9'; a node of dgx-h100 has 8"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("", "unknown profile ''"),
    ],
)
def test_a_wrong_spec_says_what_would_be_right(spec: str, says: str) -> None:
    with pytest.raises(ProfileFormatError) as caught:
        resolve_cluster(spec)
    assert says in str(caught.value)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_overrides_a_profile(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "base: dgx-a100-80gb\nnodes: 16\nlinks:\n  fabric:\n"
        "    bandwidth: {value: 100, unit: Gbit/s, kind: datasheet, source: our invoice}\n",
    )
    cluster = resolve_cluster(path)
    assert (cluster.name, cluster.devices) == ("mine", 128)
    assert cluster.levels[1].link.bandwidth_bytes_s == 12.5e9
    assert cluster.levels[1].link.latency_s == resolve_cluster("dgx-a100-80gb:16").levels[1].link.latency_s
    assert resolve_cluster(f"{path}:2x4").devices == 8


@pytest.mark.parametrize(("change", "origin"), [
    ("value: 60", ("given", "mine.yaml")), ("unit: GB", ("given", "mine.yaml")),
    ("value: 60, source: our invoice", ("given", "our invoice")), ("value: 60, kind: measured", ("measured", "mine.yaml")),
    ("value: 60, kind: datasheet, source: our invoice", ("datasheet", "our invoice")),
])
def test_a_number_that_a_file_changes_says_where_it_comes_from(change: str, origin: tuple[str, str], tmp_path: Path) -> None:
    """What it replaces was measured, and the new number was not; nothing else says otherwise than before."""
    path = write(tmp_path, f"base: dgx-a100-80gb\nnodes: 1\nchip: {{memory: {{{change}}}}}\n")
    rows, before = ({row.field: row for row in describe(name)} for name in (path, "dgx-a100-80gb"))
    assert (rows["chip.memory"].kind, rows["chip.memory"].source) == origin
    cluster = cluster_from_yaml(cluster_to_yaml(resolve_cluster(path)))
    assert cluster.sources["chip.memory"] == ": ".join(origin)
    others = rows.keys() - {"chip.memory"}
    assert [(rows[field].kind, rows[field].source) for field in others] == [
        (before[field].kind, before[field].source) for field in others
    ]


def test_numbers_in_a_file_are_those_of_a_job_file(tmp_path: Path) -> None:
    """YAML 1.2's core schema in both."""
    cluster = resolve_cluster(write(tmp_path, "base: dgx-a100-80gb\nnodes: 010\nchip: {memory: {value: 6e1}}\n"))
    assert (cluster.nodes, cluster.chip.memory_bytes) == (10, 60 * 2**30)


@pytest.mark.parametrize("name", ["1e5", "010", "no", "12345e67", "0x1F", ".5"])
def test_a_name_that_looks_like_a_number_stays_a_name(name: str, tmp_path: Path) -> None:
    cluster = replace(resolve_cluster("tpu-v4:8"), name=name)
    assert cluster_from_yaml(cluster_to_yaml(cluster)) == resolve_cluster(write(tmp_path, cluster_to_yaml(cluster))) == cluster


def of_start(folder: Path, node: str) -> float:
    """Seconds to start a call inside a node whose link a file changes."""
    path = write(folder, f"base: dgx-a100-80gb\nnodes: 2\nlinks:\n  node: {{{node}}}\n")
    cluster = resolve_cluster(path)
    assert cluster_from_yaml(cluster_to_yaml(cluster)) == cluster
    return cluster.levels[0].link.start_s


def test_another_rate_starts_a_call_as_before(tmp_path: Path) -> None:
    """Unless the file says otherwise: PCIe does not take longer to begin than NVLink for being slower."""
    before = resolve_cluster("dgx-a100-80gb:2").levels[0].link
    slow, half = "bandwidth: {value: 25, unit: GB/s}", "half_message: {value: 1, unit: MB}"
    assert of_start(tmp_path, "technology: PCIe 4") == before.start_s
    assert of_start(tmp_path, slow) == pytest.approx(before.start_s, rel=1e-12)
    assert of_start(tmp_path, "efficiency: {value: 0.5}") == pytest.approx(before.start_s, rel=1e-12)
    assert of_start(tmp_path, f"{slow}, {half}") == 1e6 / (25e9 * before.efficiency)
    assert of_start(tmp_path, half) == 1e6 / (300e9 * before.efficiency)
    assert of_start(tmp_path, f"{slow}, start: {{value: 60}}") == pytest.approx(60e-6)
    assert of_start(tmp_path, "start: {value: 0.06, unit: ms}") == pytest.approx(60e-6)
    own = write(tmp_path, f"name: own\ndevices_per_node: 8\nnodes: 1\nchip: a100-sxm-80gb\nlinks: {{node: {{{slow}}}}}\n")
    assert resolve_cluster(own).levels[0].link.start_s == pytest.approx(before.start_s, rel=1e-12)


def test_a_chip_that_a_file_names_comes_with_its_own_links(tmp_path: Path) -> None:
    """An H100 in the place of an A100 has NVLink 4; the network between nodes is the base's, and what the file says wins."""
    asked, node = resolve_cluster("dgx-h100:2"), "links: {node: {bandwidth: {value: 100}}}\n"
    swapped = resolve_cluster(write(tmp_path, "base: dgx-a100-80gb\nnodes: 2\nchip: h100-sxm-80gb\n"))
    assert swapped.chip == asked.chip and swapped.levels[0] == asked.levels[0]
    assert swapped.levels[1] == resolve_cluster("dgx-a100-80gb:2").levels[1]
    assert swapped.sources["links.node.bandwidth"] == asked.sources["links.node.bandwidth"]
    slow = resolve_cluster(write(tmp_path, f"base: dgx-a100-80gb\nnodes: 2\nchip: h100-sxm-80gb\n{node}")).levels[0].link
    assert slow == replace(
        asked.levels[0].link, bandwidth_bytes_s=100e9, peer_bytes_s=100e9, start_s=pytest.approx(asked.levels[0].link.start_s)
    )
    rack = resolve_cluster(write(tmp_path, "base: dgx-a100-80gb\nnodes: 2\nchip: gb200-nvl72\n"))
    assert [(level.link.name, level.size) for level in rack.levels] == [("NVLink 5", 8), ("InfiniBand HDR", 16)]
    with pytest.raises(ProfileFormatError, match=r"mine\.yaml: chip: unknown chip 'h100'; use one of a100-sxm-40gb"):
        resolve_cluster(write(tmp_path, "base: dgx-a100-80gb\nnodes: 2\nchip: h100\n"))


def test_a_written_cluster_is_itself_a_profile(tmp_path: Path) -> None:
    cluster = resolve_cluster("tpu-v4:8")
    assert resolve_cluster(write(tmp_path, cluster_to_yaml(cluster))) == cluster


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base: dgx-h100\n", "does not say how many nodes"),
        ("base: dgx-z100\nnodes: 1\n", "mine.yaml: base: unknown profile 'dgx-z100'"),
        ("base: [1]\nnodes: 1\n", "base: [1] is no name"),
        ("base: dgx-h100\nnodes: 0\n", "nodes"),
        ("base: dgx-h100\nnodes: 1.5\n", "nodes"),
        ("base: dgx-h100\nnodes: 1\ncolour: red\n", "colour"),
        ("- 1\n", "holds no mapping"),
        ("a: [\n", "is not YAML at line 2"),
        ("base: dgx-h100\nnodes: 1\nnodes: 2\n", "is not YAML at line 3 (nodes is written twice)"),
        ("base: dgx-h100\nnodes: 1\nchip: {peak: {float32: {value: 1.0e+300}}}\n", "1e+300 TFLOP/s is too large"),
        ("base: dgx-h100\nnodes: 1\nchip: {reserve: {value: 1.0e+300}}\n", "is too large; give the number of one device"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {value: 1.0e+8}}\n", "is too large"),
        (f"base: dgx-h100\nnodes: 1\nchip: {{memory: {{value: 1{'0' * 400}}}}}\n", "chip.memory.value: is inf; input"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {unit: GBps}}\n", "chip.memory: unit 'GBps' is not one of bytes"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {value: fast}}\n", "chip.memory.value"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {value: 0}}\n", "chip.memory: 0.0 is not positive"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {value: .inf}}\n", "chip.memory.value"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: 80}\n", "chip.memory: is 80; write fields such as {value: 60, unit: GiB"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory: {value: '6e1'}}\n", "chip.memory.value: is '6e1'; input should be a valid"),
        ("base: dgx-h100\nnodes: 1e3\n", "nodes: is 1000.0; input should be a valid integer"),
        (f"base: dgx-h100\nnodes: {'9' * 5000}\n", "is not YAML (Exceeds the limit"),
        ("base: dgx-h100\nnodes: 1\nchip: {memory_efficiency: {value: 1.2}}\n", "1.2 is above 1"),
        ("base: dgx-h100\nnodes: 1\nlinks: 3\n", "links: is 3; input should be"),
        ("base: dgx-h100\nnodes: 1\nlinks: {node: 3}\n", "links.node: is 3; input should be"),
        ("name: own\ndevices_per_node: 8\nnodes: 1\nchip: h100-sxm-80gb\nlinks: 3\n", "links: is 3; input should be"),
        ("base: dgx-h100\nnodes: 1\nlinks: {node: {start: {value: 1}, half_message: {value: 1}}}\n", "links.node.start"),
        ("base: dgx-h100\nnodes: 1\nlinks: {fabric: {size: 4}}\n", "links.fabric.size: 4, less than node's 8"),
        ("base: dgx-h100\nnodes: 4\nlinks: {fabric: {size: 16}}\n", "the links reach 16 of 32 devices"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProfileFormatError) as caught:
        resolve_cluster(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_is_what_torch_counts() -> None:
    """Each of the two dies of an MI250X is a GPU to a program, with half the memory; the two are nearest each other."""
    cluster = resolve_cluster("mi250x:2")
    assert (cluster.devices_per_node, cluster.devices) == (8, 16) and cluster.chip.memory_bytes < 2**36
    assert [(level.name, level.size) for level in cluster.levels] == [("module", 2), ("node", 8), ("fabric", 16)]
