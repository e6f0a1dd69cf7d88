"""Primitives in the order in which they run, and what follows from their order alone, whatever recomputation repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.costing.local import LocalBody
from planner.costing.paths import Paths
from planner.costing.tape import Primitive


@dataclass(frozen=True, eq=False)
class Arranged:
    """Of one placed body. ``named``: values that a variable holds."""

    local: LocalBody
    primitives: tuple[Primitive, ...]
    named: frozenset[str]

    @cached_property
    def dies(self) -> Mapping[int, tuple[str, ...]]:
        """Values that no variable holds, by the primitive that is the last to read them; the caller of an operation holds what
        it is called with until all of it has run. Of several results those that nothing reads are all called ``_``, which the
        next takes over."""
        ends = {primitive.step: at for at, primitive in enumerate(self.primitives)}
        last = {
            value: ends[p.step] if value in self.local.steps[p.step].operands else at
            for at, p in enumerate(self.primitives) for value, _ in p.reads
        }
        dying: dict[int, list[str]] = {}
        unread: list[str] = []
        for at, primitive in enumerate(self.primitives):
            for value, _ in primitive.makes:
                if value not in self.named:
                    dying.setdefault(last.get(value, at), []).append(value)
                elif len(primitive.makes) > 1 and value not in last and value not in self.local.outputs:
                    dying.setdefault(at, []).extend(unread)
                    unread = [value]
        return {at: tuple(values) for at, values in dying.items()}

    @cached_property
    def forgotten(self) -> frozenset[int]:
        """Primitives that autograd records, though no gradient will come back to them: what they keep goes with the last of
        the variables."""
        wanted, nodes = set(self.local.outputs), set[int]()
        for at in range(len(self.primitives) - 1, -1, -1):
            primitive = self.primitives[at]
            if any(value in wanted for value, _ in primitive.makes):
                wanted |= {value for value, made in primitive.reads if made is not None}
            elif primitive.differentiable:
                nodes.add(at)
        return frozenset(nodes)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters that gradients are made of."""
        return frozenset(value.name for value in self.local.body.parameters if value.differentiable)

    @cached_property
    def shares(self) -> Counter[str]:
        """Of trained parameters, the nodes that make a part of the gradient."""
        read = (item for primitive in self.primitives if primitive.differentiable for item in primitive.reads)
        return Counter(value for value, size in read if size is not None and value in self.trained)

    @cached_property
    def paths(self) -> Paths:
        """Where the gradients of parameters and of inputs come from."""
        return Paths(self.local, self.primitives, self.forgotten)

    def together(self, steps: Sequence[Collection[int]]) -> tuple[Arranged, tuple[range, ...]]:
        """With the primitives of each group of steps in one run, and these runs."""
        order, runs = list(self.primitives), []
        for inside in steps:
            order, run = _together(order, inside)
            runs.append(run)
        return Arranged(self.local, tuple(order), self.named), tuple(runs)


def _together(order: Sequence[Primitive], steps: Collection[int]) -> tuple[list[Primitive], range]:
    """The primitives of ``steps`` moved together: what lies between them goes before, or after where it reads them."""
    places = [at for at, primitive in enumerate(order) if primitive.step in steps]
    first, last = places[0], places[-1] + 1
    before, run, after = list[Primitive](), list[Primitive](), list[Primitive]()
    made: set[str] = set()
    for primitive in order[first:last]:
        if primitive.step in steps:
            run.append(primitive)
            made |= {value for value, _ in primitive.makes}
        elif any(value in made for value, _ in primitive.reads):
            after.append(primitive)
            made |= {value for value, _ in primitive.makes}
        else:
            before.append(primitive)
    start = first + len(before)
    return [*order[:first], *before, *run, *after, *order[last:]], range(start, start + len(run))
