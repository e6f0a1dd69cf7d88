"""Parameters that several blocks of one stage train: their gradient is handed over when all parts are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property

import networkx as nx

from planner.costing.paths import Paths, in_module_order
from planner.ir.graph import Block


class Shared:
    """Of a stage's blocks, and where in each the gradients of parameters are made. ``asked``: by block, values of its body
    that a gradient comes back to."""

    def __init__(self, blocks: Sequence[Block], paths: Sequence[Paths], asked: Sequence[Collection[str]]) -> None:
        self._blocks, self._paths, self._asked = blocks, paths, asked

    def _used(self, at: int) -> list[tuple[str, str]]:
        """A block's parameters that it makes a gradient of: name in its body, and in the model."""
        return [(name, fqn) for name, fqn in self._blocks[at].parameters if name in self._asked[at]]

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """The blocks that make a gradient of a parameter, by its name in the model. One that only reads it (detached, or where
        nothing is recorded) is none of them: autograd waits for no part of it."""
        users: defaultdict[str, list[int]] = defaultdict(list)
        for at in range(len(self._blocks)):
            for fqn in dict.fromkeys(fqn for _, fqn in self._used(at)):
                users[fqn].append(at)
        return users

    def of(self, at: int) -> tuple[frozenset[str], frozenset[str]]:
        """A block's parameters that earlier blocks make a gradient of too, and those that later ones do."""
        used = [(name, self._users[fqn]) for name, fqn in self._used(at)]
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
