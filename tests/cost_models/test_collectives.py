"""Collectives: hand-computed rings, the measured all-reduces, and that more bytes are never quicker."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import CollectiveKind, collective_s, point_to_point_s
from cost_models.spans import Reach, Span, span_among, span_of
from hardware_profiles import Chip, Cluster, Level, Link, resolve_cluster

FAST = Link("fast", bandwidth_bytes_s=100.0, latency_s=0.0, efficiency=1.0, start_s=0.0, peer_bytes_s=100.0)
SLOW = Link("slow", bandwidth_bytes_s=10.0, latency_s=0.0, efficiency=1.0, start_s=0.0, peer_bytes_s=10.0)
CHIP = Chip("none", 1, 1.0, {}, {}, 1.0, 1.0, 1.0, 0.0, 0.0, 0)
TOY = Cluster("toy", CHIP, (Level("node", 4, FAST), Level("fabric", 16, SLOW)), nodes=4, devices_per_node=4)
DGX = resolve_cluster("dgx-a100-80gb:16")
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize(
    ("size", "stride", "members"),
    [
        (1, 1, []),
        (2, 1, [(2, "fast")]),
        (4, 1, [(4, "fast")]),
        (8, 1, [(4, "fast"), (2, "slow")]),
        (16, 1, [(4, "fast"), (4, "slow")]),
        (4, 4, [(4, "slow")]),
        (8, 2, [(2, "fast"), (4, "slow")]),
        (2, 8, [(2, "slow")]),
        (6, 1, [(4, "fast"), (2, "slow")]),
        (4, 3, [(2, "fast"), (3, "slow")]),
    ],
)
def test_a_span_counts_members_level_by_level(size: int, stride: int, members: list[tuple[int, str]]) -> None:
    span = span_of(TOY, size, stride)
    assert [(reach.members, reach.link.name) for reach in span.reaches] == members
    assert span.even == ((size, stride) not in ((6, 1), (4, 3)))


def lain(cluster: Cluster, ranks: range) -> tuple[Reach, ...]:
    """How a group lies over every level that it crosses, counted rank by rank."""
    found, below = list[Reach](), 1
    for level in cluster.levels:
        domains: dict[int, set[int]] = {}
        for rank in ranks:
            domains.setdefault(rank // level.size, set()).add(rank // below)
        if (most := max(map(len, domains.values()))) > 1:
            found.append(Reach(most, level.link, min(Counter(rank // below for rank in ranks).values())))
        below = level.size
    return tuple(found)


@pytest.mark.parametrize("sizes", [(8, 24), (8, 56), (4, 12, 48), (6, 36), (72, 144), (8, 32, 96)])
def test_an_axis_waits_for_its_slowest_group(sizes: tuple[int, ...]) -> None:
    """Every way in which a group of an axis lies is known, of every axis that a mesh can have; the slowest counts."""
    links = (FAST, SLOW, replace(SLOW, bandwidth_bytes_s=1.0, peer_bytes_s=1.0))
    levels = tuple(Level(link.name, size, link) for size, link in zip(sizes, links, strict=False))
    cluster = replace(TOY, levels=levels, nodes=sizes[-1] // sizes[0], devices_per_node=sizes[0])
    whole = range(1, cluster.devices + 1)
    for size, stride in ((a, b) for a in whole for b in whole if a > 1 and cluster.devices % (a * b) == 0):
        starts = (start for start in range(cluster.devices) if start // stride % size == 0)
        groups = {lain(cluster, range(start, start + size * stride, stride)) for start in starts}
        span = span_of(cluster, size, stride)
        assert {span.reaches, *(other.reaches for other in span.others)} == groups, (size, stride)
        for kind in KINDS:
            alone = [collective_s(kind, Span(size, reaches), 64.0) for reaches in groups]
            assert collective_s(kind, span, 64.0) == max(alone), (kind, size, stride)


@pytest.mark.parametrize("sizes", [(8, 24), (4, 12, 48), (8, 32, 96)])
def test_members_of_an_axis(sizes: tuple[int, ...]) -> None:
    """A tied parameter's stages: groups of the ranks that there are, in either order of the axes."""
    levels = tuple(Level(link.name, size, link) for size, link in zip(sizes, (FAST, SLOW, SLOW), strict=False))
    cluster = replace(TOY, levels=levels, nodes=sizes[-1] // sizes[0], devices_per_node=sizes[0])
    whole = range(1, cluster.devices + 1)
    for axis, stride in ((a, b) for a in whole for b in whole if a > 2 and cluster.devices % (a * b) == 0):
        for members in (range(0, axis, axis - 1), range(1, axis), range(axis - 2, axis), range(0, axis, 2)):
            firsts = (first for first in range(cluster.devices) if first // stride % axis == 0)
            offsets = [member * stride for member in members]
            step = offsets[1] - offsets[0]
            groups = {lain(cluster, range(first + offsets[0], first + offsets[-1] + 1, step)) for first in firsts}
            span = span_among(cluster, members, axis, stride)
            assert {span.reaches, *(other.reaches for other in span.others)} == groups, (members, axis, stride)


@pytest.mark.slow
def test_ranks_that_fill_no_axis_have_a_span() -> None:
    """A tied parameter's stages are anywhere on the pipeline's axis."""
    for size, stride in ((a, b) for a in range(2, 25) for b in range(1, 24) if (a - 1) * b < 24):
        assert span_of(resolve_cluster("dgx-h100:3"), size, stride).reaches, (size, stride)


def test_six_ranks_in_nodes_of_eight_cross_them() -> None:
    """The first six do not."""
    cluster = resolve_cluster("dgx-h100:3")
    crossing = collective_s("all_reduce", span_of(cluster, 6, 1), 1e8)
    assert crossing > 3 * collective_s("all_reduce", span_of(cluster, 4, 1), 1e8)
    assert collective_s("all_reduce", span_of(resolve_cluster("dgx-h100:1x6"), 6, 1), 1e8) < crossing / 3


@pytest.mark.parametrize(("size", "stride"), [(17, 1), (5, 4), (0, 1), (2, 0), (2, 16)])
def test_a_group_that_does_not_fit_is_refused(size: int, stride: int) -> None:
    with pytest.raises(ValueError, match="do not fit in 16 devices"):
        span_of(TOY, size, stride)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_and_no_bytes_cost_nothing(kind: CollectiveKind) -> None:
    assert collective_s(kind, span_of(TOY, 1, 1), 1e6) == 0
    assert collective_s(kind, span_of(TOY, 4, 1), 0) == 0


def test_rings_inside_a_node() -> None:
    node = span_of(TOY, 4, 1)
    assert collective_s("all_reduce", node, 400) == pytest.approx(2 * 3 / 4 * 400 / 100)
    assert collective_s("all_gather", node, 100) == pytest.approx(3 * 100 / 100)
    assert collective_s("reduce_scatter", node, 400) == pytest.approx(3 / 4 * 400 / 100)
    assert collective_s("all_to_all", node, 400) == pytest.approx(3 / 4 * 400 / 100)


def test_a_node_uses_the_cards_of_all_its_ranks() -> None:
    """16 ranks, 4 a node: 40 bytes/s leave a node, less than the 100 that one rank passes on inside."""
    assert collective_s("all_gather", span_of(TOY, 16, 1), 100) == pytest.approx(15 * 100 / 40)
    assert collective_s("all_gather", span_of(TOY, 4, 4), 100) == pytest.approx(3 * 100 / 10)
    assert collective_s("all_to_all", span_of(TOY, 16, 1), 160) == pytest.approx(12 / 16 * 160 / 10)


def test_a_node_with_one_rank_of_the_group_lends_one_card() -> None:
    assert collective_s("all_gather", span_of(TOY, 5, 1), 100) == pytest.approx(4 * 100 / 10)
    assert collective_s("all_gather", span_of(TOY, 6, 1), 100) == pytest.approx(5 * 100 / 20)


def test_hierarchical_all_reduce_is_taken_when_latency_rules() -> None:
    wide = span_of(DGX, 128, 1)
    small = collective_s("all_reduce", wide, 1024)
    node, fabric = DGX.levels[0].link, DGX.levels[1].link
    ring = 2 * (112 * node.latency_s + 16 * fabric.latency_s)
    assert small < ring + max(node.start_s, fabric.start_s)


def test_all_reduce_is_no_cheaper_than_its_wire() -> None:
    span = span_of(TOY, 16, 1)
    assert collective_s("all_reduce", span, 1600) == pytest.approx(2 * 15 / 16 * 1600 / 40)


def test_reduce_scatter_mirrors_all_gather() -> None:
    for size, stride in ((8, 1), (16, 8), (128, 1)):
        span = span_of(DGX, size, stride)
        gathered = collective_s("all_gather", span, 1e6)
        assert collective_s("reduce_scatter", span, 1e6 * size) == pytest.approx(gathered)


@given(st.sampled_from(KINDS), st.sampled_from([(2, 1), (8, 1), (16, 1), (16, 8), (12, 1), (128, 1)]), st.floats(1, 1e10))
def test_more_bytes_are_never_quicker(kind: CollectiveKind, group: tuple[int, int], size: float) -> None:
    span = span_of(DGX, *group)
    assert collective_s(kind, span, size) <= collective_s(kind, span, size * 1.01)


@given(st.sampled_from(KINDS), st.sampled_from([2, 4, 8]), st.floats(1e3, 1e10))
def test_a_group_inside_a_node_is_never_slower_than_across(kind: CollectiveKind, size: int, bytes_in: float) -> None:
    assert collective_s(kind, span_of(DGX, size, 1), bytes_in) <= collective_s(kind, span_of(DGX, size, 8), bytes_in)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown collective 'gossip'"):
        collective_s("gossip", span_of(TOY, 4, 1), 1)  # type: ignore[arg-type]


def test_a_pair_uses_the_innermost_level_that_holds_both() -> None:
    assert point_to_point_s(TOY, 1, 100) == pytest.approx(1.0)
    assert point_to_point_s(TOY, 4, 100) == pytest.approx(10.0)
    assert point_to_point_s(TOY, 2, 100, rank=3) == pytest.approx(10.0)
    assert point_to_point_s(TOY, 0, 100) == 0
    third = replace(TOY, levels=(Level("node", 4, replace(FAST, send=1 / 3)), Level("fabric", 16, SLOW)))
    assert point_to_point_s(third, 1, 100) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="not both among 16"):
        point_to_point_s(TOY, 16, 100)


def test_pairwise_wiring_bounds_small_groups() -> None:
    cluster = resolve_cluster("mi300x:1")
    assert point_to_point_s(cluster, 1, 1e9) > 1e9 / 64e9
    assert collective_s("all_reduce", span_of(cluster, 8, 1), 1e9) < 1e9 * 2 * 7 / 8 / 64e9


MEASURED = Path(__file__).with_name("nccl_allreduce_measured.csv")
"""All-reduces of 1 MiB to 1 GiB inside one node, from VIA-Research/vTrain@f8dda84, trace/*/AR_GPU*_1M_1024M_LUT."""


@pytest.mark.parametrize(("gpu", "profile", "sizes", "bound"), [
    ("a100", "dgx-a100-80gb", range(2, 9), 0.08),
    ("v100", "dgx-v100", (2, 8), 0.12),
])  # fmt: skip
def test_measured_all_reduces_are_met(gpu: str, profile: str, sizes: Collection[int], bound: float) -> None:
    cluster = resolve_cluster(f"{profile}:1")
    errors = []
    with MEASURED.open() as file:
        for row in csv.DictReader(file):
            if row["gpu"] == gpu and int(row["n_gpus"]) in sizes:
                span = span_of(cluster, int(row["n_gpus"]), 1)
                predicted = collective_s("all_reduce", span, float(row["size_MiB"]) * 2**20)
                errors.append(abs(predicted / (float(row["time_us"]) * 1e-6) - 1))
    assert mean(errors) < bound


def test_the_axes_of_a_torus_carry_a_collective_at_once() -> None:
    def ring(size: int, torus: bool) -> Level:
        return Level(f"ring {size}", size, Link("ring", 100.0, 0.0, 1.0, 0.0, 100.0, torus=torus))

    torus = Cluster("torus", CHIP, (ring(4, True), ring(16, True)), nodes=4, devices_per_node=4)
    assert collective_s("all_gather", span_of(torus, 4, 1), 100) == pytest.approx(3 * 100 / 100)
    assert collective_s("all_gather", span_of(torus, 16, 1), 100) == pytest.approx(15 * 100 / 200)
    assert collective_s("all_reduce", span_of(torus, 16, 1), 1600) <= 2 * 15 / 16 * 1600 / 200 + 1e-9
