"""Levels lie inside each other by their sizes, wherever a file has them; what does not lie so is refused by its field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import Cluster, ProfileFormatError, cluster_from_yaml, cluster_to_yaml, resolve_cluster
from planner.clusters import resize_of, resized, sizes_up_to
from planner.ir.errors import ProfileError

NEW = """
    technology: InfiniBand NDR
    size: {size}
    bandwidth: {{value: 100, unit: Gbit/s, kind: datasheet, source: our invoice}}
    latency: {{value: 8, unit: us, kind: datasheet, source: our invoice}}
    efficiency: {{value: 0.74, unit: ratio, kind: datasheet, source: our invoice}}
    half_message: {{value: 1.875, unit: MB, kind: datasheet, source: our invoice}}
"""


def of(folder: Path, text: str, size: str = "null", counts: str = "") -> Cluster:
    path = folder / "mine.yaml"
    path.write_text(text.replace("NEW", NEW.format(size=size)))
    return resolve_cluster(f"{path}{counts}")


def sizes(cluster: Cluster) -> dict[str, int]:
    return {level.name: level.size for level in cluster.levels}


RACKS = "base: dgx-h100\nnodes: 12\nlinks:\n  rack:NEW"


def test_a_new_level_lies_where_its_size_says(tmp_path: Path) -> None:
    """Between node and fabric, though the base's file has these first."""
    cluster = of(tmp_path, RACKS, "32")
    assert sizes(cluster) == {"node": 8, "rack": 32, "fabric": 96}
    assert cluster.levels[1].link.bandwidth_bytes_s == 12.5e9
    assert cluster_from_yaml(cluster_to_yaml(cluster)) == cluster
    assert sizes(of(tmp_path, "base: dgx-h100\nnodes: 12\nlinks:\n  fabric: {size: 32}\n  spine:NEW")) == {
        "node": 8, "fabric": 32, "spine": 96,
    }


def test_levels_that_a_cluster_does_not_reach_are_left_out(tmp_path: Path) -> None:
    assert sizes(of(tmp_path, RACKS, "32", ":4")) == {"node": 8, "rack": 32}
    assert sizes(of(tmp_path, RACKS, "32", ":2")) == {"node": 8, "rack": 16}
    assert sizes(of(tmp_path, RACKS, "256")) == {"node": 8, "rack": 96}
    assert sizes(of(tmp_path, RACKS, "32", ":5")) == {"node": 8, "rack": 32, "fabric": 40}
    assert sizes(of(tmp_path, RACKS, "32", ":1x1")) == {"node": 1}


def test_a_part_of_each_node_keeps_its_levels(tmp_path: Path) -> None:
    """Levels inside a node are cut with it, a rack holds as many nodes as before; so where a file says the part."""
    board = "base: dgx-h100\nnodes: 8\nlinks:\n  board:NEW"
    assert sizes(of(tmp_path, RACKS, "32", ":12x6")) == {"node": 6, "rack": 24, "fabric": 72}
    assert sizes(of(tmp_path, board, "4", ":8x2")) == {"board": 2, "fabric": 16}
    assert sizes(resolve_cluster("jean-zay-a100:2x4")) == {"node": 4, "fabric": 8}
    assert sizes(of(tmp_path, "base: jean-zay-a100\nnodes: 2\ndevices_per_node: 4\n")) == {"node": 4, "fabric": 8}
    part = resolve_cluster("jean-zay-a100:2x6")
    assert sizes(part) == {"boards": 6, "fabric": 12}, "one board of four devices and a part of another"
    assert cluster_from_yaml(cluster_to_yaml(part)) == part


@pytest.mark.slow
def test_hosts_make_a_node(tmp_path: Path) -> None:
    """Of a part of a node they give equally many; a prediction does not follow them."""
    rack = resolve_cluster("gb200-nvl72:2")
    assert (rack.devices_per_node, rack.devices_per_host, rack.hosts) == (72, 4, 36)
    assert resolve_cluster("gb300-nvl72:1").hosts == 18
    assert replace(rack, host_devices=8).fingerprint == rack.fingerprint
    assert cluster_from_yaml(cluster_to_yaml(rack)) == rack
    for used, hosts in ((8, 2), (6, 2), (2, 1), (1, 1), (7, 7)):
        part = resolve_cluster(f"gb200-nvl72:1x{used}")
        assert (part.hosts, part.hosts * part.devices_per_host) == (hosts, used)
        assert cluster_from_yaml(cluster_to_yaml(part)) == part == resized(rack, 1, used)
        assert of(tmp_path, f"base: gb200-nvl72\nnodes: 1\ndevices_per_node: {used}\n").hosts == hosts
    assert resolve_cluster("dgx-h100:2").hosts == 2
    assert of(tmp_path, "base: dgx-h100\nnodes: 2\nhost_devices: 4\n").hosts == 4


def test_a_cluster_in_another_size_keeps_its_levels(tmp_path: Path) -> None:
    cluster = of(tmp_path, RACKS, "32")
    assert sizes(resized(cluster, 13, 8)) == {"node": 8, "rack": 32, "fabric": 104}
    assert sizes(resized(cluster, 12, 6)) == {"node": 6, "rack": 24, "fabric": 72}
    board = replace(resolve_cluster("jean-zay-a100:2"), name="mine")
    assert sizes(resized(board, 2, 4)) == {"node": 4, "fabric": 8}


@pytest.mark.parametrize(("text", "size", "larger"), [
    ("base: dgx-h100\nnodes: 1\nchip: {launch: {value: 5}}\n", "", {"node": 8, "fabric": 16}),
    (RACKS.replace("12", "2"), "16", {"node": 8, "rack": 16, "fabric": 24}),
    (RACKS.replace("12", "1"), "16", {"node": 8, "rack": 16}),
    ("base: dgx-h100\nnodes: 2\nlinks:\n  fabric: {size: 16}\n  pod:NEW", "null", {"node": 8, "fabric": 16, "pod": 24}),
])
def test_one_more_node_meets_the_levels_beyond(tmp_path: Path, text: str, size: str, larger: dict[str, int]) -> None:
    """The cluster file of a plan has them too, and a cluster that does not reach them is the same without."""
    cluster = of(tmp_path, text, size)
    kept = cluster_from_yaml(cluster_to_yaml(cluster))
    assert kept == cluster
    assert sizes(resized(kept, cluster.nodes + 1, 8)) == larger
    assert resized(kept, cluster.nodes + 1, 8) == of(tmp_path, text, size, f":{cluster.nodes + 1}")
    assert cluster.beyond
    assert replace(cluster, beyond=()).fingerprint == cluster.fingerprint


def test_more_nodes_than_links_join_are_refused(tmp_path: Path) -> None:
    cluster = of(tmp_path, "base: dgx-h100\nnodes: 2\nlinks: {fabric: {size: 16}}\n")
    with pytest.raises(ProfileError, match=r"^mine: the links reach 16 of 24 devices; give fewer nodes, or links that join"):
        resized(cluster, 3, 8)


H100, BOARDS = "base: dgx-h100\nnodes: 8\nlinks: ", "base: jean-zay-a100\nnodes: 8\nlinks: "


@pytest.mark.parametrize(("text", "size", "says"), [
    (RACKS, "8", "links.rack.size: 8, as node's is; give the one that lies inside the other its number of devices"),
    (RACKS, "null", "links.rack.size: null (all devices), as fabric's is; give the one"),
    (RACKS, "20", "links.rack.size: 20 is no multiple of node's 8; a level holds whole ones of what lies inside it"),
    (BOARDS + "{boards: {size: 4}}", "", "links.boards.size: 4, as node's is"),
    (H100 + "{node: {size: 6}}", "", "links.node.size: 6 does not divide devices_per_node, 8; a level inside a node has"),
    ("base: dgx-h100\nnodes: 8\ndevices_per_node: 10\n", "", "links.node.size: 8 does not divide devices_per_node, 10"),
    (BOARDS + "{node: {size: 2}, boards: {size: 12}}", "", "links.boards.size: 12 is no multiple of devices_per_node, 8"),
    (RACKS + "    start: {value: 1, unit: us, kind: fitted, source: guess}\n", "32",
     "links.rack.start: is given beside half_message; give either start or half_message"),
    (RACKS.replace("NEW", NEW.rpartition("    half_message")[0].format(size=32)), "",
     "links.rack.start: is missing; give either start or half_message"),
    (H100 + "{fabric: {size: 4}}", "", "links.fabric.size: 4, less than node's 8, which lies inside it in dgx-h100; sizes are"),
    (H100 + "{node: {size: null}, fabric: {size: 16}}", "", "links.fabric.size: 16, less than node's null (all devices)"),
    (H100 + "{node: {size: 16}}", "", "links.node.size: 16 is more than devices_per_node, 8"),
    ("base: gb200-nvl72\nnodes: 36\ndevices_per_node: 4\nlinks: {node: {size: 72}}", "",
     "4; its link joins a node's devices: give devices_per_node: 72 and fewer nodes, and host_devices: 4 where hosts of so"),
    ("base: dgx-h100\nnodes: 8\nhost_devices: 3\n", "", "host_devices: 3 does not divide devices_per_node, 8; give"),
    ("base: gb200-nvl72\nnodes: 8\ndevices_per_node: many\n", "", "devices_per_node: is 'many'; input should be"),
    ("base: gb200-nvl72\nnodes: 8\ndevices_per_node: 0\n", "", "devices_per_node: is 0; input should be greater"),
])
def test_levels_that_do_not_lie_inside_each_other_are_refused(tmp_path: Path, text: str, size: str, says: str) -> None:
    with pytest.raises(ProfileFormatError, match=r"mine\.yaml: ") as caught:
        of(tmp_path, text, size)
    assert says in str(caught.value)


@pytest.mark.parametrize(("spec", "used", "levels", "hosts"), [
    ("jean-zay-a100:2", 5, {"boards": 5}, None), ("jean-zay-a100:2", 3, {"node": 3}, None), ("tpu-v5p:2", 3, {"x": 3}, None),
    ("gb200-nvl72:2", 6, {"node": 6}, 3), ("gb200-nvl72:2", 7, {"node": 7}, 1),
])
def test_a_part_of_a_node_has_the_levels_that_it_fills(
    spec: str, used: int, levels: dict[str, int], hosts: int | None
) -> None:
    """Over five of eight devices, on boards of four, some would be joined by a board and some not."""
    whole = resolve_cluster(spec)
    assert [size for size in sizes_up_to(whole) if size[1] == used] == [(1, used)]
    for resize in (resized, resize_of(spec)):
        part = resize(whole, 1, used)
        assert ({level.name: level.size for level in part.levels}, part.host_devices) == (levels, hosts)
