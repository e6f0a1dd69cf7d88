"""When nothing was found: the plan of least memory either is a plan, or says by how much nothing fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from hardware_profiles import Cluster
from planner.ir.costed import CostedGraph
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.ir.plan import StageMemory
from planner.search.candidates import Candidate
from planner.search.least import Least, LeastMemory
from planner.search.request import Request
from planner.search.solve import Fingerprints

GIB = 2**30
LEAST_S = 20.0
"""Seconds for the proof at most."""
Costing = Callable[[Candidate], CostedGraph | None]


class MemoryTooSmall(NoPlanFits):
    """No plan fits in memory. ``least``: the plan that needs the least, None where no candidate can be placed at all."""

    def __init__(self, wrong: str, right: str, least: Least | None) -> None:
        super().__init__("memory", wrong, right)
        self.least = least


def last_resort(
    candidates: Sequence[Candidate], prices: Costing, graph: ModelGraph, cluster: Cluster, request: Request,
    names: Fingerprints,
) -> Least:
    """A plan that fits, although the search found none in its time. Raises MemoryTooSmall where none does."""
    given = LEAST_S if request.time_limit_s is None else min(LEAST_S, max(LEAST_S / 4, request.time_limit_s))
    deadline = time.perf_counter() + given
    limit = cluster.chip.memory_bytes
    least = LeastMemory(graph, candidates, prices, cluster, request, names, deadline, enough=limit).run()
    if least is None:
        raise MemoryTooSmall("no placement is feasible under these constraints", "another tensor degree", None)
    if least.prediction.fits:
        return least
    raise MemoryTooSmall(shortage(least), "give it more memory, more devices or fewer constraints", least)


def shortage(least: Least) -> str:
    """What the plan of least memory needs, where, and how far that is from fitting; and whether this is proven."""
    worst = max(least.prediction.stages, key=lambda stage: stage.memory.total)
    category = max(
        (field.name for field in fields(StageMemory)), key=lambda name: int(getattr(worst.memory, name))
    )
    mesh, limit = least.plan.mesh, least.prediction.memory_limit_bytes
    if least.bound_bytes >= least.peak_bytes - 1:
        proof = "proven: none needs less"
    elif least.bound_bytes > limit:
        proof = f"proven: every plan is at least {least.bound_bytes - limit} bytes above the limit"
    else:
        proof = f"not proven in the time given: no plan needs less than {least.bound_bytes / GIB:.2f} GiB"
    return (
        f"no plan fits: the least memory (pipeline {mesh.pipeline} x data {mesh.data} x tensor {mesh.tensor}) needs "
        f"{worst.memory.total / GIB:.2f} GiB on the rank of stage {worst.index}, {category} "
        f"{getattr(worst.memory, category) / GIB:.2f} GiB of it; the limit is "
        f"{limit / GIB:.2f} GiB, {least.peak_bytes - limit} bytes too few ({proof})"
    )
