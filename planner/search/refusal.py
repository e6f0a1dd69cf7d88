"""When nothing was found: the plan of least memory either is a plan, or says by how much nothing fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

from hardware_profiles import Cluster
from planner.constraints import Combination, Condition, Constraints
from planner.ir.costed import CostedGraph
from planner.ir.errors import NoPlanFits, PinError, ShardwrightError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction, StageMemory
from planner.search.beyond import WIDER
from planner.search.candidates import Candidate, allowed_choices
from planner.search.least import Least, LeastMemory
from planner.search.prices import Prices
from planner.search.request import Look, Request, as_it_is
from planner.search.solve import Fingerprints
from planner.search.uniform import ladders

GIB = 2**30
LEAST_S = 20.0
"""Seconds for the proof at most."""
LOOKS = 3
"""So often a plan that fits by its sums only is sought again with less memory."""
ALONE_S = 1.0
"""Seconds at most for plans that may fit by a closer look alone."""
COMPARED = 8
"""So many of those that do are compared."""
Costing = Callable[[Candidate], CostedGraph | None]
Memory = Callable[[Sequence[Candidate], float], LeastMemory]
"""The search for the least memory of some candidates, which ends with a plan of at most so many bytes."""


class MemoryTooSmall(NoPlanFits):
    """No plan fits in memory by its sums, and none of those that need the least by a closer look. ``least``: the plan of the
    least sums; ``prices``: what was priced on the way."""

    def __init__(self, wrong: str, right: str, least: Least, prices: Prices | None = None) -> None:
        super().__init__("memory", wrong, right)
        self.least, self.prices = least, prices

    @property
    def proven(self) -> bool:
        """Whether no plan fits by its sums; else the time was over before that was known."""
        return self.least.bound_bytes > self.least.prediction.memory_limit_bytes


def unplaceable(candidates: Sequence[Candidate], graph: ModelGraph, constraints: Constraints) -> ShardwrightError:
    """What to raise where no candidate can be placed at all: tensor=1 always can, so constraints exclude it. Those on ZeRO are
    named where they leave blocks nothing but a stage that these cannot have, those on tensor ranks else; where there are none,
    others leave some layer nothing to choose."""
    stuck = [_beyond_zero_3(candidate, graph, constraints) for candidate in candidates]
    if stuck and all(stuck):
        names = [graph.blocks[index].name for index in stuck[0]]
        some = ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
        wrong = (
            f"zero=3 is not possible for {some}: they share parameters, and the last of them ends in values that get no "
            "gradient (detached, or made without gradients), so torch gathers none for their backward pass"
        )
        return PinError(_where(constraints, ("zero",)), wrong, "zero of 0, 1 or 2 for these")
    placing = ("tensor", "sequence_parallel")
    said = [str(condition) for condition in _conditions(constraints, placing)]
    said += [f"not ({combination})" for combination in _combinations(constraints, placing)]
    if not said:
        return NoPlanFits("constraints", "they leave some layer no placement or no choice", "fewer of them")
    wrong = f"{' and '.join(said)} leave{'s' if len(said) == 1 else ''} no placement of the model's tensors"
    return PinError(_where(constraints, placing), wrong, "another value, or leave it out")


def _conditions(constraints: Constraints, names: Sequence[str]) -> list[Condition]:
    return [condition for name in names for condition in constraints.on(name)]


def _combinations(constraints: Constraints, names: Sequence[str]) -> list[Combination]:
    return [each for each in constraints.forbidden if any(condition.name in names for condition in each.conditions)]


def _where(constraints: Constraints, names: Sequence[str]) -> str:
    """The last field that limits one of these decisions."""
    conditions = _conditions(constraints, names)
    return conditions[-1].field if conditions else _combinations(constraints, names)[-1].where


def _beyond_zero_3(candidate: Candidate, graph: ModelGraph, constraints: Constraints) -> list[int]:
    """Blocks that a candidate leaves nothing but ZeRO 3, and that cannot have it."""
    spaces = allowed_choices(candidate.first, constraints, graph)
    return [
        index for index in sorted(graph.gradients.ungathered_by(candidate.mesh.pipeline))
        if spaces and all(space.of_block(index)[1] == (3,) for space in spaces)
    ]


def last_resort(
    candidates: Sequence[Candidate], prices: Costing, graph: ModelGraph, cluster: Cluster, request: Request,
    names: Fingerprints, deadline: float = math.inf, look: Look = as_it_is,
) -> Least:
    """A plan that fits, by a closer ``look`` too, although the search found none in its time. ``deadline``: of the whole search
    (time.perf_counter); a few seconds more where it is near. Raises MemoryTooSmall where nothing fits."""
    now = time.perf_counter()
    until = max(now + LEAST_S / 4, min(now + LEAST_S, deadline))

    def memory(some: Sequence[Candidate], enough: float) -> LeastMemory:
        return LeastMemory(graph, some, prices, cluster, request, names, until, enough=enough)

    least = looked_at(memory, candidates, cluster.chip.memory_bytes, look, until + ALONE_S, COMPARED)
    if least is None:
        raise unplaceable(candidates, graph, request.constraints)
    if least.prediction.fits:
        return least
    known = prices if isinstance(prices, Prices) else None
    raise MemoryTooSmall(shortage(least), "give it more memory, more devices or fewer constraints", least, known)


def looked_at(
    memory: Memory, candidates: Sequence[Candidate], limit_bytes: int, look: Look, deadline: float, compared: int = 1
) -> Least | None:
    """A plan of little memory that fits by a closer ``look``, else the one that misses the limit by least, with the one that
    does by that look; None where no candidate can be placed at all. ``compared``: of so many that fit by that look alone, the
    quickest."""
    least: Least | None = None
    closest: tuple[Plan, Prediction] | None = None
    fitting: list[Least] = []
    enough = float(limit_bytes)
    for _ in range(LOOKS):
        found = memory(candidates, enough).run()
        if found is None:
            return None
        seen, by_sums = look(found.plan, found.prediction), found.peak_bytes
        if seen.fits and by_sums <= limit_bytes:
            return replace(found, prediction=seen)
        closest = _thriftier(closest, (found.plan, seen))
        if seen.peak_memory_bytes > by_sums:
            found = replace(found, prediction=seen)
        least = found if least is None or found.peak_bytes < least.peak_bytes else least
        if by_sums > enough:
            fitting += [replace(found, prediction=seen)] if seen.fits else []
            break
        enough -= seen.peak_memory_bytes - limit_bytes
    if least is None or look is as_it_is:
        return least
    others = _thrifty(memory, candidates, limit_bytes, look, deadline)
    while len(fitting) < compared and (each := next(others, None)) is not None:
        closest = _thriftier(closest, (each.plan, each.prediction))
        fitting += [each] if each.prediction.fits else []
    return min(fitting, key=lambda each: each.prediction.step_s, default=replace(least, closest=closest))


def _thriftier(known: tuple[Plan, Prediction] | None, other: tuple[Plan, Prediction]) -> tuple[Plan, Prediction]:
    return min((known or other, other), key=lambda pair: pair[1].peak_memory_bytes)


def _thrifty(
    memory: Memory, candidates: Sequence[Candidate], limit_bytes: int, look: Look, deadline: float
) -> Iterator[Least]:
    """Plans that may fit by a closer look, whatever their sums: of every candidate the one of the least sums, and those of one
    ZeRO stage for all blocks, least ones first. They are in no search's space, whose plans fit by their sums."""
    until, most = min(deadline, time.perf_counter() + ALONE_S), WIDER * limit_bytes
    every = memory(candidates, -math.inf)
    for bound, candidate in every.bounds():
        if bound > most or time.perf_counter() > until:
            return
        found = memory((candidate,), most).run()
        if found is None:
            continue
        yield replace(found, prediction=look(found.plan, found.prediction))
        for ladder in sorted(ladders(every.tasks(candidate)), key=lambda ladder: ladder[0].sums_bytes):
            for rung in ladder.of_one_level:
                if not rung.may_fit(limit_bytes, WIDER) or time.perf_counter() > until:
                    break
                seen = look(rung.plan, rung.prediction)
                yield replace(found, plan=rung.plan, prediction=seen)
                if not seen.fits:
                    break


def shortage(least: Least) -> str:
    """What the plan of least memory needs, where, and how far that is from fitting; and what is proven of all others."""
    plan, prediction = least.thriftiest
    worst = max(prediction.stages, key=lambda stage: stage.memory.total)
    category = max(
        (field.name for field in fields(StageMemory)), key=lambda name: int(getattr(worst.memory, name))
    )
    mesh, needed, limit = plan.mesh, prediction.peak_memory_bytes, prediction.memory_limit_bytes
    if least.bound_bytes >= least.peak_bytes - 1:
        proof = "proven: by their sums none needs less"
        proof += "" if least.peak_bytes == needed else f" than {told(least.peak_bytes)}"
    elif least.bound_bytes > limit:
        proof = f"proven: by its sums every plan is at least {least.bound_bytes - limit} bytes above the limit"
    else:
        proof = f"not proven in the time given: by its sums no plan needs less than {told(least.bound_bytes)}"
    return (
        f"no plan fits: the least memory (pipeline {mesh.pipeline} x data {mesh.data} x tensor {mesh.tensor}) needs "
        f"{told(worst.memory.total)} on the rank of stage {worst.index}, {category} "
        f"{told(getattr(worst.memory, category))} of it; the limit is {told(limit)}, "
        f"{needed - limit} byte{'s' if needed - limit > 1 else ''} too few ({proof}; of the thriftiest none fits as replayed)"
    )


def told(size_bytes: float) -> str:
    """Bytes for a reader."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 100 else f"{size_bytes / 2**20:.2f} MiB"
