"""From the search's plan to one that fits by the ledger: sums bound memory while searching, the replay decides what is kept."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from hardware_profiles import Cluster
from planner.evaluate import replayed
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.search import Request, SearchResult, search
from planner.search.prices import Prices
from planner.search.request import News, no_news


def fitted(
    graph: ModelGraph, cluster: Cluster, request: Request, *, known: Prices | None = None, news: News = no_news
) -> SearchResult:
    """The best plan whose replayed memory fits.

    The search bounds memory by sums that hold for most plans, from above. Every plan that would be the best so far is replayed
    before it is kept; where it takes more after all and does not fit, the search goes on with as much memory less for that
    candidate. Its certificate is that of all plans that fit by sums, of which those that fit by replay are a part. Seconds of
    ``replay`` are told apart from those of ``solve``. ``known``: prices of another search of the graph; ``news``: is told
    from time to time how far the search has come. Raises what :func:`planner.search.search` raises.
    """
    look = _Replay(graph, cluster)
    result = search(graph, cluster, request, look=look, known=known, news=news)
    seconds = {**result.seconds, "solve": max(0.0, result.seconds["solve"] - look.seconds), "replay": look.seconds}
    return replace(result, seconds=seconds)


@dataclass
class _Replay:
    """The closer look. ``seconds``: what it has taken in this process."""

    graph: ModelGraph
    cluster: Cluster
    seconds: float = 0.0

    def __call__(self, plan: Plan, prediction: Prediction) -> Prediction:
        begin = time.perf_counter()
        seen = replayed(prediction, plan, self.graph, self.cluster)
        self.seconds += time.perf_counter() - begin
        return seen
