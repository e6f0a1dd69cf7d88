"""What is asked of the search, and its certificate."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hardware_profiles import Cluster
from planner.constraints import Constraints, Headroom
from planner.ir.errors import PinError
from planner.ir.plan import OptimizerSettings, Plan, Precision, Prediction

if TYPE_CHECKING:
    from planner.search.prices import Prices

Look = Callable[[Plan, Prediction], Prediction]
"""A prediction whose memory was looked at more closely than by sums."""


News = Callable[[float, float], None]
"""Is told of a search under way: seconds a step of the best plan so far, and how far that may be from the optimum."""


def no_news(step_s: float, gap: float) -> None:
    """Nobody asks."""


def as_it_is(plan: Plan, prediction: Prediction) -> Prediction:
    """No closer look."""
    return prediction


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of quality: no plan of the ``candidates`` takes less than ``lower_bound_s``; ``solved`` of them needed an ILP, and
    bounds excluded the rest once the gap was what the search was asked for. ``constraints``: under which, as the command line
    writes them. ``edited``: its file does not have it as it was written, and it proves nothing."""

    lower_bound_s: float
    candidates: int
    solved: int
    constraints: tuple[str, ...] = ()
    edited: bool = False

    def seal(self, batch: int, model: str, cluster: str) -> str:
        """16 hex digits of what is proven and of what it is about: the global ``batch`` in samples, and the fingerprints of the
        ``model`` (which tells sequences and precisions apart) and of the ``cluster``."""
        proof = (self.lower_bound_s, self.candidates, self.solved, self.constraints, batch, model, cluster)
        return hashlib.sha256(json.dumps(proof).encode()).hexdigest()[:16]

    def gap_of(self, step_s: float) -> float:
        """How far, at most, a plan of ``step_s`` is from the best, as a part of its own step."""
        return max(0.0, 1.0 - self.lower_bound_s / step_s)


@dataclass(frozen=True)
class Request:
    """``batch``: global, in samples; ``gap``: stop within this part of the optimum; ``time_limit_s`` of solving;
    ``memory_limit_bytes``: what one device may hold at most, its reserve counted, beside its own memory; ``most_s``: plans of
    longer steps do not matter, so that a search ends once no shorter one is possible."""

    batch: int
    sequence: int
    precision: Precision
    constraints: Constraints = field(default_factory=Constraints)
    gap: float = 0.001
    time_limit_s: float | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    memory_limit_bytes: int | None = None
    most_s: float = math.inf

    def limited(self, cluster: Cluster) -> Cluster:
        """The cluster with the memory that a plan may use: less head-room, at most the limit. Raises PinError where head-room
        leaves nothing beside the reserve."""
        memory, headroom = cluster.chip.memory_bytes, self.constraints.headroom
        free = 0 if headroom is None else headroom.of(memory)
        if headroom is not None and memory - free <= cluster.chip.reserve_bytes:
            usable = memory - cluster.chip.reserve_bytes
            wrong = f"{headroom} leaves nothing of the {usable} bytes of a device that plans can use"
            raise PinError(headroom.where, wrong, "less head-room")
        allowed = min(memory - free, memory if self.memory_limit_bytes is None else self.memory_limit_bytes)
        return cluster if allowed == memory else replace(cluster, chip=replace(cluster.chip, memory_bytes=allowed))

    def asked(self, cluster: Cluster) -> Constraints:
        """The constraints, a limit of memory among them as head-room."""
        if self.memory_limit_bytes is None:
            return self.constraints
        free = cluster.chip.memory_bytes - self.limited(cluster).chip.memory_bytes
        return self.constraints.with_(Headroom(size_bytes=free)) if free else self.constraints


@dataclass(frozen=True)
class SearchResult:
    """``seconds``: where the search's own time went (cost, solve); ``prices``: what it priced, for searches like it."""

    plan: Plan
    prediction: Prediction
    certificate: Certificate
    seconds: Mapping[str, float] = field(default_factory=dict)
    prices: Prices | None = field(default=None, repr=False, compare=False)

    @property
    def optimality_gap(self) -> float:
        return self.certificate.gap_of(self.prediction.step_s)

    @property
    def lower_bound_s(self) -> float:
        return self.certificate.lower_bound_s

    @property
    def candidates(self) -> int:
        return self.certificate.candidates

    @property
    def solved(self) -> int:
        return self.certificate.solved
