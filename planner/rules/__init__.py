"""Sharding rules: every legal way to run each operation over the tensor axis, as a table of equations. No torch here.

:func:`strategies` spells out one node, :func:`shard_variants` says which shards a body can take up,
:func:`has_rule` whether an operation is known. ``equation.py`` explains what a rule is.
"""

from planner.rules.enumerate import has_rule, output_key, strategies
from planner.rules.variants import shard_variants

__all__ = ["has_rule", "output_key", "shard_variants", "strategies"]
