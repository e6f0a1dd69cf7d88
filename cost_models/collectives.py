"""Seconds of one collective: alpha-beta models over the levels of a cluster.

A message of n bytes takes ``latency + start + n / rate`` (Hockney 1994). Bytes on the wire per rank, of a group of p:

- ring all-gather and reduce-scatter: (p - 1) shards; ring all-reduce: twice that (Thakur 2005; Chan 2007);
  NCCL's bus bandwidth is these bytes over the time (nccl-tests, doc/PERFORMANCE.md);
- a ring over nodes enters and leaves every node once for each rank that the group has in it, because NCCL builds a ring
  a network card: the group's ranks of a node use their cards together, and the slowest level decides the rate;
- hierarchical all-reduce: reduce-scatter inside, all-reduce of the shard outside, all-gather inside (Jia 2018);
- double binary trees between nodes (Sanders 2009; NCCL since 2.4): log steps, twice the message on the wire;
- a torus: each axis is a ring, and all axes carry a part of the message at once (Jouppi 2023, TPU v4, section 2; scaling-book,
  "How to parallelise", on TPUs);
- all-to-all: pairwise messages, all posted at once; every level carries its share at the same time.

The quickest algorithm that is valid for a group counts. All-gather and reduce-scatter are rings only, as in NCCL;
over gloo a reduce-scatter is an all-reduce (ProcessGroupGloo.cpp of torch, reduce_scatter_tensor_coalesced).
"""

from __future__ import annotations

from math import ceil, log2
from typing import Literal

from cost_models.spans import Span
from hardware_profiles import Cluster

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def collective_s(kind: CollectiveKind, span: Span, size_bytes: float) -> float:
    """Seconds of a collective whose INPUT tensor on one rank has ``size_bytes`` (all_gather: the shard; all_reduce,
    reduce_scatter, all_to_all: the whole), by the slowest of the axis' groups, which the others wait for. A group of one, or no
    bytes, costs nothing."""
    if span.size == 1 or size_bytes <= 0:
        return 0.0
    return max(_group_s(kind, group, size_bytes) for group in (span, *span.others))


def _group_s(kind: CollectiveKind, span: Span, size_bytes: float) -> float:
    if kind == "all_reduce":
        return _all_reduce_s(span, size_bytes)
    if kind == "all_gather":
        return _ring_s(span, (span.size - 1) * size_bytes, laps=1)
    if kind == "reduce_scatter" and any(reach.link.reduce_scatter == "all_reduce" for reach in span.reaches):
        return _all_reduce_s(span, size_bytes)
    if kind == "reduce_scatter":
        return _ring_s(span, (span.size - 1) / span.size * size_bytes, laps=1)
    if kind == "all_to_all":
        return _all_to_all_s(span, size_bytes)
    raise ValueError(f"unknown collective {kind!r}")


def _all_reduce_s(span: Span, size_bytes: float) -> float:
    ring = _ring_s(span, 2 * (span.size - 1) / span.size * size_bytes, laps=2)
    if span.crosses == 1:
        return ring
    quickest = min(ring, _tree_s(span, size_bytes))
    return min(quickest, _hierarchical_s(span, size_bytes)) if span.even else quickest


def _ring_s(span: Span, wire_bytes: float, laps: int) -> float:
    """A chunk passes every link of the ring once a lap, ``wire_bytes`` pass every rank."""
    return laps * span.lap_s + span.start_s + wire_bytes / span.ring_rate


def _tree_s(span: Span, size_bytes: float) -> float:
    """Chains inside the innermost domain, double binary trees outside; up, then down."""
    inner, *outer = span.reaches
    steps = (inner.members - 1) * inner.link.latency_s
    steps += sum(ceil(log2(reach.members)) * reach.link.latency_s for reach in outer)
    return 2 * steps + span.start_s + 2 * size_bytes / span.ring_rate


def _hierarchical_s(span: Span, size_bytes: float) -> float:
    inside = span.inside
    scatter = _ring_s(inside, (inside.size - 1) / inside.size * size_bytes, laps=1)
    if span.crosses == 1:
        return 2 * scatter
    return 2 * scatter + _all_reduce_s(span.across, size_bytes / inside.size)


def _all_to_all_s(span: Span, size_bytes: float) -> float:
    latency = max(reach.link.latency_s for reach in span.reaches)
    inside, slowest = 1, 0.0
    for reach in span.reaches:
        within = min(span.size, inside * reach.members)
        carried = size_bytes * (within - reach.fewest) / span.size
        slowest = max(slowest, carried / reach.link.rate(reach.members))
        inside = within
    return latency + span.start_s + slowest


def point_to_point_s(cluster: Cluster, stride: int, size_bytes: float, rank: int = 0) -> float:
    """Seconds to send ``size_bytes`` from ``rank`` to ``rank + stride``, over the innermost level that holds both."""
    if stride == 0 or size_bytes <= 0:
        return 0.0
    link = next((level.link for level in cluster.levels if rank // level.size == (rank + stride) // level.size), None)
    if link is None or rank + stride >= cluster.devices:
        raise ValueError(f"ranks {rank} and {rank + stride} are not both among {cluster.devices} devices")
    return link.send * (link.latency_s + link.start_s + size_bytes / link.rate(2))
