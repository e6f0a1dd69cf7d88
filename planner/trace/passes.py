"""Passes of a step beside the one that is exported: what differs between them a program would not have.

A trace is one pass. Others are run without an export: on few samples, once more of the same model, under other random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.trace.batches import ADVICE, FEW, SAMPLES, Called, Scale, difference, few
from planner.trace.build import BuiltModel, build
from planner.trace.generators import other_draws, seeded
from planner.trace.source import ModelSource

Run = Callable[[ModelSource, BuiltModel, int, frozenset[str]], Sequence[Called]]
"""What a step calls: of a model, for a number of samples, where some modules do not run."""
SAME = Scale(FEW[0], FEW[0])
"""Of two passes on as many samples, whatever their number."""


def refuse_batch_numbers(
    source: ModelSource, built: BuiltModel, run: Run, calls: Sequence[Called], batch: int, drawn: frozenset[str]
) -> None:
    """Raise ModelError where the step computes something from the number of samples, or from how often it has run. ``calls``:
    of the export, on ``batch`` samples, in which the modules ``drawn`` did not run."""
    samples = few([extent for parameter in built.parameters for extent in parameter.type.shape if isinstance(extent, int)])
    scale = Scale(batch, samples)
    used = run(source, built, samples, drawn)
    if difference(calls, used, scale) is None:
        return
    first, second = (  # models as new, both without an export: what differed may be what the first pass left behind
        run(anew, build(anew, built.dtype), number, frozenset())
        for anew, number in ((source.anew(), batch), (source.anew(), samples))
    )
    parting = difference(first, second, scale)
    if parting is not None:
        raise parting.caused_by(SAMPLES, ADVICE)
    _refuse_counting(used, lambda: run(source, built, samples, drawn))


def _refuse_counting(used: Sequence[Called], again: Callable[[], Sequence[Called]]) -> None:
    """Raise ModelError where a step of a model that has run before is another each time it runs. ``used``: what its last pass
    called; ``again``: one more on the same number of samples. What the first pass of a size leaves behind (a mask, a rotary
    table) is the same from the pass after it on."""
    second = again()
    parting = difference(used, second, SAME) and difference(second, again(), SAME)
    if parting is not None:
        raise parting.caused_by("how often forward has run", "a program would have its first pass in every step: let forward "
                                "change nothing of the model but tables that stay the same")


def refuse_foreign_draws(source: ModelSource, built: BuiltModel, run: Run) -> None:
    """Raise ModelError where the step, which draws from numpy's or Python's generator, is another under other draws."""
    runs = list[Sequence[Called]]()
    for draws in (seeded(), *other_draws()):
        anew = source.anew()  # each with a model as new, whose layers all run
        fresh = build(anew, built.dtype)
        with draws:
            runs.append(run(anew, fresh, FEW[0], frozenset()))
        parting = difference(runs[0], runs[-1], SAME)
        if parting is not None:
            raise parting.caused_by("what numpy or Python draws at random", "a program would have one draw in every "
                                    "step: draw by torch's own functions, or switch off what draws (layer drop, SpecAugment)")
