"""Seconds of what crosses pipeline cuts, and of the sums of single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from cost_models.collectives import collective_s, point_to_point_s
from cost_models.pipeline import StageTimes
from cost_models.spans import span_of
from hardware_profiles import Cluster
from hardware_profiles.cluster import Level
from planner.ir.plan import Mesh, Plan


def sums_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """The all-reduces of single numbers that a step makes whatever its plan: the loss' weight over the data axis, loss and
    gradient norm over the world (runtime/loop.py, ``gradients``)."""
    spans = [span_of(cluster, mesh.data, mesh.data_stride), span_of(cluster, mesh.devices, 1)]
    return sum(collective_s("all_reduce", span, 16) for span in spans if span.size > 1)


def send_seconds(cluster: Cluster, mesh: Mesh, size_bytes: float, whole_bytes: int | None = None) -> float:
    """Seconds to send ``size_bytes`` to the next pipeline rank: the slowest of all pairs of neighbours. ``whole_bytes``: of
    all tensor ranks together, where each sends its own part only and what was replicated is gathered after (Narayanan 2021,
    section 4.1)."""
    if mesh.pipeline == 1 or size_bytes <= 0:
        return 0.0
    gather_s = 0.0
    if whole_bytes is not None and size_bytes > (part := -(-whole_bytes // mesh.tensor)):
        gather_s = collective_s("all_gather", span_of(cluster, mesh.tensor, mesh.tensor_stride), part)
        size_bytes = part
    return gather_s + max(
        point_to_point_s(cluster, mesh.pipeline_stride, size_bytes, rank) for rank in _senders(cluster.levels, mesh)
    )


@lru_cache(maxsize=4096)
def _senders(levels: tuple[Level, ...], mesh: Mesh) -> tuple[int, ...]:
    """Of the ranks that send to the next of their pipeline, one for each level that joins such a pair."""
    found: dict[int, int] = {}
    pairs = product(range(mesh.pipeline - 1), *(_unlike(levels, mesh, *axis) for axis in (
        (mesh.data, mesh.data_stride), (mesh.tensor, mesh.tensor_stride),
    )))
    stride, ranks = mesh.pipeline_stride, (mesh.rank(*pair) for pair in pairs)
    for rank in ranks:
        # Where no level holds both, the price says what is wrong.
        innermost = next((at for at, level in enumerate(levels) if rank // level.size == (rank + stride) // level.size), -1)
        found.setdefault(innermost, rank)
    return tuple(found.values())


def _unlike(levels: Sequence[Level], mesh: Mesh, degree: int, stride: int) -> range:
    """Ranks of an axis, so far apart, whose pipelines may lie over other links: those until all repeats."""
    sizes, apart = [level.size for level in levels[:-1]], mesh.pipeline_stride
    # Where ranks up to the next of a pipeline fill domains, or domains are filled by such, all of these are like the first.
    if stride < apart and all(size % apart == 0 or apart % size == 0 for size in sizes):
        return range(1)
    inner = math.lcm(*sizes)
    return range(min(degree, inner // math.gcd(inner, stride)))


def blocked_times(plan: Plan, times: Sequence[StageTimes], blocking_s: Sequence[float]) -> tuple[StageTimes, ...]:
    """Stage times with what a rank stops for: every pass receives over one cut and sends over the other, in a call that moves
    both ways at once (Megatron-LM, ``send_forward_recv_backward``), so half of each counts. ``blocking_s[v]``: of the cut
    before virtual stage v; nothing is sent inside a rank."""
    if not any(blocking_s):
        return tuple(times)
    result = []
    for index, stage in enumerate(times):
        inner = [cut for cut in (index, index + 1) if 0 < cut < len(times)]
        cuts = [cut for cut in inner if plan.rank_of_stage(cut - 1) != plan.rank_of_stage(cut)]
        stopped = sum(blocking_s[cut] for cut in cuts) / 2
        result.append(StageTimes(stage.forward_s + stopped, stage.input_gradient_s + stopped, stage.weight_gradient_s))
    return tuple(result)
