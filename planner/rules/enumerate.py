"""Strategies of one node: its equation, spelled out in placements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from planner.ir.body import Node
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, OpStrategy, Placement
from planner.ir.types import FLOATING, Ref, TensorType
from planner.rules.equation import Equation, Index, Site
from planner.rules.layout import Layout, Part, canonical, layout_of, put, take
from planner.rules.table import RULES

Variants = Mapping[str, tuple[Placement, ...]]
"""Shard placements worth considering, by value; :func:`output_key` names the outputs of a node with several."""


def has_rule(node: Node) -> bool:
    """Whether the operation is in the table; one that is not runs whole on every rank."""
    return node.base in RULES


def output_key(node: Node, at: int) -> str:
    """Key of an output in a table of variants: the node's name for the first, ``name[1]`` and so on for others."""
    return f"{node.name}[{at}]" if at else node.name


def operand_keys(node: Node) -> tuple[str, ...]:
    """Keys of the operands; ``getitem`` reads one output of several."""
    if node.base != "getitem":
        return node.operands
    source, at = node.argument("input"), node.argument("index")
    return (f"{source.name}[{at}]",) if isinstance(source, Ref) and at else node.operands


def site_of(node: Node, types: Mapping[str, TensorType]) -> Site:
    """The node with its operands' types."""
    if node.base == "getitem":
        return Site(node, node.types)
    return Site(node, tuple(types[name] for name in node.operands))


def equation_of(site: Site) -> Equation:
    """The rule's equation; an empty one without a rule."""
    rule = RULES.get(site.node.base)
    return rule(site) if rule else Equation()


def strategies(
    node: Node, types: Mapping[str, TensorType], degree: int, differentiable: frozenset[str],
    variants: Variants | None = None,
) -> tuple[OpStrategy, ...]:
    """Every legal way to run a node over a tensor axis of ``degree`` ranks, without repetitions.

    ``types``: whole types of the values by name; ``differentiable``: values that carry a gradient. ``variants`` limits
    the shards to those that the rest of the body can take up (:func:`planner.rules.variants.shard_variants`); without
    it each index is split once, in the coarsest way that the node itself asks for.
    """
    site = site_of(node, types)
    gradient = tuple(name in differentiable for name in node.operands)
    found = [_uniform("replicated", REPLICATE, site, gradient)]
    if node.differentiable:
        found.append(_uniform("shared", SHARED, site, gradient))
    if degree > 1:
        equation = equation_of(site)
        if node.differentiable:
            found += _partial(equation, site, gradient)
        for index in equation.indices:
            for layout in _layouts(index, site, degree, variants):
                strategy = shard_strategy(index, layout, site, degree, gradient)
                if strategy is not None and _within(strategy, node, variants):
                    found.append(strategy)
    return tuple({(item.operands, item.outputs): item for item in reversed(found)}.values())[::-1]


def _uniform(name: str, placement: Placement, site: Site, gradient: Sequence[bool]) -> OpStrategy:
    """Everything that carries a gradient in one state, the rest replicated."""
    return OpStrategy(
        name,
        tuple(placement if carries else REPLICATE for carries in gradient),
        tuple(placement if _carries(site, at) else REPLICATE for at in range(len(site.outputs))),
    )


def _carries(site: Site, at: int) -> bool:
    """Whether an output carries a gradient."""
    return site.node.differentiable and site.outputs[at].dtype in FLOATING


def _partial(equation: Equation, site: Site, gradient: Sequence[bool]) -> Iterator[OpStrategy]:
    """The operation on partial sums, where it is linear in operands that may be such."""
    if not all(_carries(site, at) for at in range(len(site.outputs))):
        return
    for group in equation.linear:
        if group and all(gradient[at] for at in group):
            others = tuple(SHARED if carries else REPLICATE for carries in gradient)
            operands = tuple(PARTIAL if at in group else other for at, other in enumerate(others))
            suffix = "" if len(equation.linear) == 1 else f" {min(group)}"
            yield OpStrategy(f"partial{suffix}", operands, (PARTIAL,) * len(site.outputs))


def shard_strategy(
    index: Index, layout: Layout, site: Site, degree: int, gradient: Sequence[bool]
) -> OpStrategy | None:
    """The operation with one index split; None where some dim cannot take the layout."""
    operands: list[Placement] = []
    for part, carries in zip(index.operands, gradient, strict=True):
        placed = _placed(layout, part, degree) if part else SHARED if carries else REPLICATE
        if placed is None:
            return None
        operands.append(placed)
    outputs: list[Placement] = []
    for at, end in enumerate(index.outputs):
        placed = _placed(layout, end, degree) if isinstance(end, Part) else end
        if placed is None or (placed == PARTIAL and not _carries(site, at)):
            return None
        outputs.append(placed)
    plain = len(layout.segments) == 1 and layout.unit == 1
    extra = "" if plain else f" ({'+'.join(map(str, layout.segments))}, unit {layout.unit})"
    return OpStrategy(f"split {index.name}{extra}", tuple(operands), tuple(outputs), index.forward, index.backward)


def _placed(layout: Layout, part: Part, degree: int) -> Placement | None:
    here = put(layout, part, degree)
    return here.placement(part.dim) if here is not None else None


def plain_layout(index: Index, degree: int) -> Layout | None:
    """The split that the node itself asks for: even in single positions, or the pieces as segments."""
    cuts = {0, index.extent}
    for end in (*index.operands, *index.outputs):
        if isinstance(end, Part) and end.piece:
            cuts |= set(end.piece)
    ordered = sorted(cuts)
    return canonical([high - low for low, high in pairwise(ordered)], 1, degree)


def occurrences(index: Index, node: Node) -> Iterator[tuple[str, Part]]:
    """Where an index lies: keys of values with the part."""
    for key, part in zip(operand_keys(node), index.operands, strict=True):
        if part is not None:
            yield key, part
    for at, end in enumerate(index.outputs):
        if isinstance(end, Part):
            yield output_key(node, at), end


def _layouts(index: Index, site: Site, degree: int, variants: Variants | None) -> tuple[Layout, ...]:
    """Layouts of an index to try."""
    if variants is None:
        plain = plain_layout(index, degree)
        return (plain,) if plain else ()
    found: set[Layout] = set()
    for key, part in occurrences(index, site.node):
        if part.piece is None:
            for placement in variants.get(key, ()):
                if placement.dim == part.dim:
                    layout = layout_of(placement, index.extent * part.outer * part.inner, degree)
                    pulled = take(layout, part, degree) if layout else None
                    if pulled is not None:
                        found.add(pulled)
    return tuple(sorted(found))


def _within(strategy: OpStrategy, node: Node, variants: Variants | None) -> bool:
    """Whether every shard is among the variants of its value."""
    if variants is None:
        return True
    placed = [*zip(operand_keys(node), strategy.operands, strict=True)]
    placed += [(output_key(node, at), placement) for at, placement in enumerate(strategy.outputs)]
    return all(placement.state != "shard" or placement in variants.get(key, ()) for key, placement in placed)
