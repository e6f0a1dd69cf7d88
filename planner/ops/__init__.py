"""What an operation costs (:mod:`planner.ops.work`), what autograd keeps for it (:mod:`planner.ops.saved`) and how its
results lie in memory (:mod:`planner.ops.layout`). Local types in, plain numbers out."""

from planner.ops.layout import Layout, fresh
from planner.ops.results import result_layouts
from planner.ops.saved import Saved, saved
from planner.ops.work import AttentionShape, Work, backward_work, work

__all__ = ["AttentionShape", "Layout", "Saved", "Work", "backward_work", "fresh", "result_layouts", "saved", "work"]
