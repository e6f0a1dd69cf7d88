"""Which way the gradients of parameters and those of inputs go through a block: what a split backward pass is divided by.

torch's zero-bubble schedules run the nodes on the way to a stage's inputs first and keep what came into every node where the
way from a parameter ends (``torch/distributed/pipelining/_backward.py``, ``get_param_groups``); from there the weight part
runs on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import networkx as nx

from planner.costing.local import LocalBody
from planner.costing.tape import PASS, Primitive


class Paths:
    """Of one placed body and its primitives, those ``forgotten`` to which no gradient comes back."""

    def __init__(self, local: LocalBody, primitives: Sequence[Primitive], forgotten: Collection[int]) -> None:
        self._local, self._primitives, self._forgotten = local, primitives, forgotten
        self._inputs = frozenset(value.name for value in local.body.inputs)

    @cached_property
    def _meetings(self) -> tuple[Mapping[str, frozenset[str]], Mapping[int, frozenset[str]]]:
        """Values that are made of parameters alone, with these; and the primitives in which such a value meets the path of the
        inputs, with the parameters that come together there."""
        derived = {value.name: frozenset({value.name}) for value in self._local.body.parameters}
        meetings: dict[int, frozenset[str]] = {}
        for at, primitive in enumerate(self._primitives):
            reads = [value for value, made in primitive.reads if made is not None]
            names = frozenset(name for value in reads for name in derived.get(value, ()))
            if reads and all(value in derived for value in reads):
                derived |= {value: names for value, _ in primitive.makes}
            elif names and at not in self._forgotten:
                meetings[at] = names
        return derived, meetings

    @property
    def derived(self) -> Mapping[str, frozenset[str]]:
        """Values that are made of parameters alone, and of which."""
        return self._meetings[0]

    def joining(self, nodes: Collection[int]) -> frozenset[str]:
        """The parameters that join at these primitives."""
        return frozenset(name for at in nodes for name in self._meetings[1][at])

    def leading_to(self, nodes: Collection[int]) -> frozenset[str]:
        """Values that are made of the parameters alone that join at these primitives."""
        names = self.joining(nodes)
        return frozenset(value for value, own in self.derived.items() if own & names)

    @cached_property
    def joins(self) -> frozenset[int]:
        """Primitives in which a path from a parameter meets the path of the inputs."""
        return frozenset(self._meetings[1])

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Those primitives as the weight part of a split pass takes them: by parameter, in the order of the block's modules;
        parameters that join at one of them are taken together. Those that go over nodes of others come first
        (runtime/weight_part.py)."""
        together: nx.Graph[int | str] = nx.Graph((at, name) for at, names in self._meetings[1].items() for name in names)
        order = in_module_order([value.name for value in self._local.body.parameters])
        parts = [nx.node_connected_component(together, name) for name in order if name in together]
        found = dict.fromkeys(tuple(sorted(at for at in part if isinstance(at, int))) for part in parts)
        return tuple(sorted(found, key=lambda group: not self.goes_over_others(group)))

    def goes_over_others(self, group: Sequence[int]) -> bool:
        """Whether other parameters join on the way from one of these primitives to another: their nodes are kept for them
        (runtime/weight_part.py)."""
        way = self.between(group)
        others = self.joins.difference(group) if way else ()
        return any(value in way for at in others for value, _ in self._primitives[at].makes)

    def between(self, nodes: Collection[int]) -> frozenset[str]:
        """Values on the way from one of these primitives to another of them."""
        if len(nodes) < 2:
            return frozenset()
        led = set[str]()
        for at, primitive in enumerate(self._primitives):
            if at in nodes or any(made is not None and value in led for value, made in primitive.reads):
                led |= {value for value, _ in primitive.makes}
        return frozenset(led & self._before(nodes))

    def inward(self, nodes: Collection[int], waits: Collection[str]) -> frozenset[str]:
        """The same, where parameters that join at these primitives and wait for earlier blocks may be reached there."""
        if not self.joining(nodes).intersection(waits):
            return self.between(nodes)
        return frozenset(self._before(nodes) - self.derived.keys())

    def _before(self, nodes: Collection[int]) -> set[str]:
        """Values that lead to these primitives."""
        wanted = set[str]()
        for at in range(max(nodes), -1, -1):
            if at in nodes or any(value in wanted for value, _ in self._primitives[at].makes):
                wanted |= {value for value, made in self._primitives[at].reads if made is not None}
        return wanted

    @cached_property
    def handed_on(self) -> Mapping[str, tuple[str, ...]]:
        """By value made of parameters alone, those of them whose gradients are the value's own, as it lies."""
        found: dict[str, tuple[str, ...]] = {}
        for primitive in self._primitives:
            handed = [value for value, made in primitive.reads if made == PASS and value in self.derived]
            names = tuple(dict.fromkeys(name for value in handed for name in found.get(value, (value,))))
            found |= {result: names for result, _ in primitive.makes if names and result in self.derived}
        return found

    def reached(self, outputs: Collection[str]) -> tuple[frozenset[int], frozenset[str]]:
        """Primitives, and differentiable inputs, that the graph of the weight part still leads to, where nodes of later blocks
        lead to ``outputs``."""
        wanted, nodes = set(outputs), set[int]()
        for at in range(len(self._primitives) - 1, -1, -1):
            primitive = self._primitives[at]
            if primitive.differentiable and (at in self.joins or any(value in wanted for value, _ in primitive.makes)):
                nodes.add(at)
                wanted |= {value for value, made in primitive.reads if made is not None}
        return frozenset(nodes), frozenset(wanted & self._inputs)

    def holds(self, outputs: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Inputs that the graph of the weight part keeps, and those of them that it keeps until the whole stage's is done:
        nodes that run let go of what they keep, others live as long as a later block's (to ``outputs``) leads to them."""
        held, retained = set[str](), set[str]()
        for at in self.reached(outputs)[0]:
            kept = {self._local.root.get(value, value) for value in self._primitives[at].keeps} & self._inputs
            held |= kept
            retained |= kept if outputs and at not in self.joins else set()
        return frozenset(held), frozenset(retained)


def in_module_order(names: Sequence[str], *, parts_first: bool = False) -> list[str]:
    """Dotted names as ``nn.Module.parameters`` gives them: a module's own, then those of its parts, part by part; or
    ``parts_first``, as FSDP2 lists those of a unit (torch/distributed/fsdp/_fully_shard/_fsdp_init.py,
    ``_get_managed_modules``)."""
    def walk(items: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        own = [name for name, rest in items if len(rest) == 1]
        parts: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for name, rest in items:
            if len(rest) > 1:
                parts.setdefault(rest[0], []).append((name, rest[1:]))
        others = [name for part in parts.values() for name in walk(part)]
        return [*others, *own] if parts_first else [*own, *others]

    return walk([(name, tuple(name.split("."))) for name in names])
