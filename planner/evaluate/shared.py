"""Parameters that several blocks of one stage use: their gradient is handed over when all parts are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import networkx as nx

from planner.costing.paths import Paths, in_module_order
from planner.ir.graph import Block


class Shared:
    """Of a stage's blocks, and where in each the gradients of parameters are made."""

    def __init__(self, blocks: Sequence[Block], paths: Sequence[Paths]) -> None:
        self._blocks, self._paths = blocks, paths

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """The blocks that use a parameter, by its name in the model."""
        users: defaultdict[str, list[int]] = defaultdict(list)
        for at, block in enumerate(self._blocks):
            for fqn in dict.fromkeys(fqn for _, fqn in block.parameters):
                users[fqn].append(at)
        return users

    def of(self, at: int) -> tuple[frozenset[str], frozenset[str]]:
        """A block's parameters that earlier blocks use too, and those that later ones do."""
        used = [(name, self._users[fqn]) for name, fqn in self._blocks[at].parameters]
        return (
            frozenset(name for name, users in used if users[0] < at), frozenset(name for name, users in used if users[-1] > at),
        )

    @cached_property
    def groups(self) -> list[list[tuple[int, int]]]:
        """What a split backward pass takes together of several blocks (:attr:`Paths.groups`), in the order of the modules, as
        (block, group of that block), last block first."""
        together: nx.Graph[object] = nx.Graph()
        first: dict[tuple[int, int], int] = {}
        for at, (block, paths) in enumerate(zip(self._blocks, self._paths, strict=True)):
            shared, fqns = frozenset[str]().union(*self.of(at)), dict(block.parameters)
            order = in_module_order(list(fqns))
            for index, group in enumerate(paths.groups if shared else ()):
                names = paths.joining(group) & shared
                together.add_edges_from(((at, index), fqns[name]) for name in names)
                first[at, index] = min(map(order.index, names), default=0)
        parts = [sorted(first.keys() & part) for part in nx.connected_components(together)]
        parts.sort(key=lambda part: (part[0][0], first[part[0]]))
        return [part[::-1] for part in parts]
