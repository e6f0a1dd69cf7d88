"""From the search's plan to one that fits by the ledger: bounds decide while searching, the replay what is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import Cluster
from planner.evaluate import replayed
from planner.ir.graph import ModelGraph
from planner.search import Request, SearchResult

ATTEMPTS = 4
Search = Callable[[ModelGraph, Cluster, Request], SearchResult]


def fitted(find: Search, graph: ModelGraph, cluster: Cluster, request: Request) -> SearchResult:
    """The plan that ``find`` finds, its memory replayed.

    The search bounds memory by sums that hold for most plans, from above. Where a plan takes more after all and does not fit,
    the search is repeated with as much memory less; its certificate then is the first one's, of which it is a restriction.
    Raises what ``find`` raises.
    """
    limit = request.limited(cluster).chip.memory_bytes
    result = _replayed(find(graph, cluster, request), graph, cluster)
    first, allowed = result.certificate.lower_bound_s, limit
    for _ in range(ATTEMPTS):
        excess = result.prediction.peak_memory_bytes - limit
        if excess <= 0:
            break
        allowed -= excess
        result = _replayed(find(graph, cluster, replace(request, memory_limit_bytes=allowed)), graph, cluster)
        bound = min(first, result.certificate.lower_bound_s)
        result = replace(result, certificate=replace(result.certificate, lower_bound_s=bound))
    return result


def _replayed(result: SearchResult, graph: ModelGraph, cluster: Cluster) -> SearchResult:
    return replace(result, prediction=replayed(result.prediction, result.plan, graph, cluster))
