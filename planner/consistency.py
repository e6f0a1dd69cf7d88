"""What only a whole plan shows: decisions, each legal alone, that contradict one another."""

from __future__ import annotations

from planner.evaluate import parameter_placement, tied_parameters
from planner.ir.errors import PlanFileError
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, Placement
from planner.ir.plan import SPLIT_BACKWARD, Plan


def check_consistency(plan: Plan, graph: ModelGraph, where: str) -> None:
    """Raise PlanFileError, naming the field, for the first contradiction. ``where`` names the file."""
    _check_schedule(plan, graph, where)
    _check_activations(plan, graph, where)
    _check_tied(plan, graph, where)
    _check_gathers(plan, graph, where)


def _check_schedule(plan: Plan, graph: ModelGraph, where: str) -> None:
    """Schedules that split the backward pass run neither ZeRO 3 nor recomputation, nor gradients that begin in two places."""
    if plan.schedule.name not in SPLIT_BACKWARD:
        return
    if len(graph.strands) > 1:
        raise PlanFileError(
            f"{where}: schedule.name", f"{plan.schedule.name} splits backward passes by what leads to a stage's inputs, and "
            f"gradients of this model begin in two places, {graph.strands[0]} and {graph.strands[1]}", "another schedule",
        )
    for stage in plan.stages:
        if any(decision.zero == 3 or decision.recompute != "none" for decision in stage.decisions):
            raise PlanFileError(
                f"{where}: stages.{stage.index}", f"{plan.schedule.name} runs neither ZeRO 3 nor recomputation",
                "zero: 0, 1 or 2 and recompute: none, or another schedule",
            )


def _check_activations(plan: Plan, graph: ModelGraph, where: str) -> None:
    """A block finds its inputs as the blocks before it left them; what no block wrote is whole."""
    written: dict[str, tuple[Placement, str]] = {}
    for block in graph.blocks:
        body, placement = graph.body_of[block.body], plan.placements[block.body]
        for name, value, found in zip(block.reads, body.inputs, placement.inputs, strict=True):
            left, field = written.get(name, (REPLICATE, ""))
            if found != left:
                wrong = f"is {found}, but {field} is {left}" if field else f"is {found}, but no block writes it"
                raise PlanFileError(f"{where}: placements.{body.name}.boundary.{value.name}", wrong, "make them the same")
        for name, value_name, left in zip(block.writes, body.outputs, placement.outputs, strict=True):
            written[name] = left, f"placements.{body.name}.boundary.{value_name}"


def _check_tied(plan: Plan, graph: ModelGraph, where: str) -> None:
    """A parameter of several blocks has one ZeRO stage and one placement."""
    decisions = [decision for stage in plan.stages for decision in stage.decisions]
    for parameter, owners in tied_parameters(graph):
        names = ", ".join(graph.blocks[block].name for block in owners)
        if len({decisions[block].zero for block in owners}) > 1:
            wrong = f"{names} share {parameter.fqn} at different ZeRO stages"
            raise PlanFileError(f"{where}: stages", wrong, "one ZeRO stage for all")
        placed = {str(parameter_placement(graph, plan, block, parameter.fqn)) for block in owners}
        if len(placed) > 1:
            wrong = f"{names} share {parameter.fqn}, which is {' and '.join(sorted(placed))}"
            raise PlanFileError(f"{where}: placements", wrong, "one placement for all")


def _check_gathers(plan: Plan, graph: ModelGraph, where: str) -> None:
    """ZeRO 3 gathers parameters for a backward pass that torch sees begin."""
    for stage in plan.stages:
        ungathered = graph.gradients.ungathered(stage.first, stage.last)
        for at, decision in enumerate(stage.decisions, stage.first):
            if decision.zero == 3 and at in ungathered:
                raise PlanFileError(
                    f"{where}: stages.{stage.index}", f"{graph.blocks[at].name} shares parameters with a block after it whose "
                    "values are only detached, and torch gathers none of them for its backward pass under ZeRO 3",
                    "zero: 0, 1 or 2",
                )
