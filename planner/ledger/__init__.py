"""The plan's side of the rehearsal ledger: what one rank communicates in a step, from the plan and the graph alone.

``predict`` puts it together; ``tensor`` counts inside the blocks, ``data`` what ZeRO makes of the parameters, ``pipeline``
what crosses the cuts. It shares no code with ``runtime/rehearsal.py``, which records the same from a run of the emitted
program; ``compare`` says where the two part.
"""

from planner.ledger.calls import Call, Place, RankLedger
from planner.ledger.compare import Difference, compare
from planner.ledger.predict import predict_rank, representatives

__all__ = ["Call", "Difference", "Place", "RankLedger", "compare", "predict_rank", "representatives"]
