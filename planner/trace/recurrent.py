"""Pass 3c: recurrent networks with dropout between their layers, layer by layer: every mask is drawn at its own place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.types import Argument, Ref, TensorType
from planner.trace.canonical import drops_between, substitute
from planner.trace.flat import FlatGraph


def layers_apart(graph: FlatGraph) -> FlatGraph:
    """The graph with one operation for every layer of such a network, and dropout between two."""
    results: dict[str, tuple[str, ...]] = {}
    renamed: dict[str, str] = {}
    types: dict[str, TensorType] = dict(graph.inputs)
    nodes: list[Node] = []
    for original in graph.nodes:
        node = substitute(original, renamed)
        first = len(nodes)
        if drops_between(node) and "input" in dict(node.arguments):  # not of packed sequences
            layers = _Layers(node, types)
            results[node.name] = layers.write()
            nodes += layers.made
        elif node.op == "getitem" and node.operands[0] in results:
            index = node.argument("index")
            assert isinstance(index, int)
            renamed[node.name] = results[node.operands[0]][index]
        else:
            nodes.append(node)
        types |= {made.name: made.type for made in nodes[first:]}
    return replace(graph, nodes=tuple(nodes), outputs=tuple(renamed.get(name, name) for name in graph.outputs))


class _Layers:
    """The nodes that stand for one. States have the types that they begin with: before 2.13 torch tells others of an LSTM's."""

    def __init__(self, node: Node, types: Mapping[str, TensorType]) -> None:
        self.node, self.said = node, dict(node.arguments)
        start = self.said["hx"]
        self.start = start if isinstance(start, tuple) else (start,)
        self.states = tuple(types[each.name] for each in self.start if isinstance(each, Ref))
        self.ways = 2 if self.said["bidirectional"] else 1
        self.made: list[Node] = []

    def write(self) -> tuple[str, ...]:
        """Returns the names of the results: the last layer's outputs, and the states that each layer ends in."""
        count, value, given = self.said["num_layers"], self.said["input"], self.said["params"]
        assert isinstance(count, int) and isinstance(given, tuple)
        each = len(given) // count
        ends: list[tuple[str, ...]] = []
        for at in range(count):
            output, *states = self._layer(at, value, given[at * each : (at + 1) * each])
            ends.append(tuple(states))
            value = Ref(output)
            if at + 1 < count:
                dropout = (("input", value), ("p", self.said["dropout"]), ("train", True))
                value = Ref(self._add(f"dropped_{at}", "dropout", dropout, self.node.types[0]))
        joined = [self._join(index, [each[index] for each in ends]) for index in range(len(ends[0]))]
        return (output, *joined)

    def _layer(self, at: int, value: Argument, given: tuple[Argument, ...]) -> list[str]:
        states = tuple(self._state(at, index, of) for index, of in enumerate(self.start))
        changed: dict[str, Argument] = {
            "input": value, "hx": states if isinstance(self.said["hx"], tuple) else states[0], "params": given,
            "num_layers": 1, "dropout": 0.0,
        }
        arguments = tuple((name, changed.get(name, argument)) for name, argument in self.node.arguments)
        types = (self.node.types[0], *map(self._of_one, self.states))
        whole = self._add(f"layer_{at}", self.node.op, arguments, *types)
        return [
            self._add(f"layer_{at}_{index}", "getitem", (("input", Ref(whole)), ("index", index)), type_)
            for index, type_ in enumerate(types)
        ]

    def _state(self, at: int, index: int, of: Argument) -> Ref:
        """[directions, batch, features] of one layer, of [layers x directions, batch, features]."""
        cut = (("self", of), ("dim", 0), ("start", at * self.ways), ("end", (at + 1) * self.ways), ("step", 1))
        return Ref(self._add(f"start_{at}_{index}", "slice.Tensor", cut, self._of_one(self.states[index])))

    def _of_one(self, type_: TensorType) -> TensorType:
        return replace(type_, shape=(self.ways, *type_.shape[1:]))

    def _join(self, index: int, states: list[str]) -> str:
        arguments: tuple[tuple[str, Argument], ...] = (("tensors", tuple(map(Ref, states))), ("dim", 0))
        return self._add(f"end_{index}", "cat", arguments, self.states[index])

    def _add(self, name: str, op: str, arguments: tuple[tuple[str, Argument], ...], *types: TensorType) -> str:
        self.made.append(replace(self.node, name=f"{self.node.name}_{name}", op=op, arguments=arguments, types=types))
        return self.made[-1].name
