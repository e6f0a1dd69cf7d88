"""The one evaluator: what a plan costs, whoever made it.

``step`` puts it together; ``stage`` sums the blocks of a virtual stage, ``memory`` says what a rank holds, ``traffic`` what
crosses the cuts, ``tied`` what shared parameters add. ``replay`` (with ``heap`` and ``units``) plays a rank's step event by
event: its memory is exact where that of ``memory`` is a bound.
"""

from planner.evaluate.memory import receive_buffer_bytes, receive_buffers, replayed
from planner.evaluate.stage import backward_seconds, forward_seconds, own_bytes
from planner.evaluate.step import evaluate, evaluate_counted, evaluate_plan, last_passes
from planner.evaluate.tied import parameter_placement, tied_parameters, tied_sum_seconds
from planner.evaluate.traffic import send_seconds, sums_seconds

__all__ = [
    "backward_seconds", "evaluate", "evaluate_counted", "evaluate_plan", "forward_seconds", "last_passes", "own_bytes",
    "parameter_placement", "receive_buffer_bytes", "receive_buffers", "replayed", "send_seconds", "sums_seconds",
    "tied_parameters", "tied_sum_seconds",
]
