"""How often each unit's parameters are gathered and its gradients reduced in a step: FSDP2's states, played through.

A unit is gathered when a pass needs it and it is not whole, and let go after a forward pass (ZeRO 3) or after a backward pass
(ZeRO 3, or the step's last; torch 2.13: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``unshard``,
``post_forward``, ``post_backward``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.schedules import Action, actions
from planner.ir.plan import SPLIT_BACKWARD, Plan
from planner.ledger.units import Unit


@dataclass(slots=True)
class Turns:
    """What happens to one unit in a step: gathers of its parameters, reductions of its gradients over the shard group.
    ``whole``: its parameters are gathered now; ``reached``, ``fetched``: as in :class:`planner.ledger.units.Unit`."""

    zero: int
    reached: bool = True
    fetched: bool = True
    gathers: int = 0
    reductions: int = 0
    whole: bool = False

    def gather(self) -> None:
        self.gathers += not self.whole
        self.whole = True

    def forward(self) -> None:
        self.gather()
        self.whole = self.zero < 3

    def backward(self, *, last: bool) -> None:
        """A whole backward pass; the step's last reduces what was accumulated. What nobody waits for stays until the next
        pass that does."""
        self.fetch()
        self.reductions += last or self.zero >= 2
        self.whole = self.whole and (self.zero < 3 or not self.reached) and not last

    def fetch(self) -> None:
        """A backward pass gathers what it reaches, and what lies before it."""
        if self.reached or self.fetched:
            self.gather()

    def weight_gradient(self, *, last: bool) -> None:
        """The weight part of a backward pass in two parts; ZeRO 2 reduces after each, the others after the last."""
        self.fetch()
        self.reductions += last or self.zero == 2
        self.whole = self.whole and not last


def play(plan: Plan, pipeline_rank: int, stages: Mapping[int, Sequence[Unit]]) -> dict[int, tuple[Turns, ...]]:
    """One step of a pipeline rank. ``stages``: the units of each of its virtual stages; the result is by virtual stage, units
    in the same order."""
    units = {
        stage: tuple(Turns(unit.zero, unit.reached, unit.fetched) for unit in given) for stage, given in stages.items()
    }
    microbatches = plan.batch.accumulation
    left = dict.fromkeys(units, microbatches)
    for item in _order(plan, pipeline_rank):
        mine = units[item.stage]
        left[item.stage] -= item.kind in "BW"
        last = left[item.stage] == 0
        for turns in mine:
            if item.kind == "F":
                turns.forward()
            elif item.kind == "B":
                turns.backward(last=last)
            elif item.kind == "I":
                turns.fetch()
            else:
                turns.weight_gradient(last=last)
    return units


def _order(plan: Plan, pipeline_rank: int) -> Iterator[Action]:
    """The rank's actions."""
    mesh, schedule, count = plan.mesh, plan.schedule, plan.batch.accumulation
    if mesh.pipeline > 1:
        yield from actions(schedule.name, mesh.pipeline, schedule.virtual, count)[pipeline_rank]
        return
    for index in range(count):
        yield Action("F", 0, index)
        yield Action("B", 0, index)


def splits_backward(plan: Plan) -> bool:
    """Whether input and weight gradients are made apart."""
    return plan.mesh.pipeline > 1 and plan.schedule.name in SPLIT_BACKWARD
