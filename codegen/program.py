"""Program: what will be written, as plain data. Every decision is made here; rendering only chooses how it looks.

Variables of a function are in single-assignment form. Sizes are whole (global) in types and local in arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from planner.ir.body import Node
from planner.ir.graph import BatchInput, Buffer, InitStep
from planner.ir.placement import OpStrategy, Placement
from planner.ir.plan import Plan
from planner.ir.types import Dtype, LocalArgument, RankSize, TensorType

HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor in a function: its whole type and how it lies over the tensor axis."""

    name: str
    type: TensorType
    placement: Placement
    differentiable: bool = False


@dataclass(frozen=True)
class Compute:
    """One operation on local tensors. ``arguments`` refer to variables; ``targets`` are one name per output (empty: unused).

    ``call``: the method of the tensor axis or of the random stream that replaces the operation, with what it takes in
    ``extra``; empty for torch's own.
    """

    node: Node
    arguments: tuple[tuple[str, LocalArgument], ...]
    targets: tuple[str, ...]
    strategy: OpStrategy | None = None
    call: str = ""
    extra: tuple[tuple[str, LocalArgument], ...] = ()


@dataclass(frozen=True, slots=True)
class Convert:
    """``target = tp.<method>(source, **keywords)``. ``size_bytes`` is one call's input for one sample, or 0."""

    source: str
    target: str
    method: str
    keywords: tuple[tuple[str, int | str | tuple[int, ...]], ...]
    size_bytes: int
    module: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """``targets = checkpoint(self.<method>, *arguments)``: forgotten after the forward pass, repeated in the backward."""

    method: str
    arguments: tuple[str, ...]
    targets: tuple[str, ...]
    random: bool


Statement: TypeAlias = "Compute | Convert | Repeat"


@dataclass(frozen=True)
class Function:
    """A function over variables. ``attributes``: names in the body that are the object's, each with its path there.

    ``random``: it takes the random stream as its last argument.
    """

    name: str
    inputs: tuple[str, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    variables: Mapping[str, Variable]
    attributes: Mapping[str, str] = field(default_factory=dict)
    random: bool = False
    degree: int = 1


@dataclass(frozen=True, slots=True)
class Declaration:
    """A parameter (or constant) of a block class, by its path in the block."""

    path: str
    type: TensorType
    placement: Placement
    trainable: bool = True


@dataclass(frozen=True)
class BlockClass:
    """A class of ``model.py``. ``base`` names the class that it is except for ``recomputed``; empty: its own."""

    name: str
    body: str
    doc: tuple[str, ...]
    parameters: tuple[Declaration, ...]
    constants: tuple[Declaration, ...]
    forward: Function
    regions: tuple[Function, ...]
    recomputed: bool
    base: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One block of the chain: its class and the keys of its parameters and constants, which are ``prefix`` and the path but
    for those that ``bindings`` (path, key) lists."""

    name: str
    cls: str
    prefix: str = ""
    bindings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks that one loop of the stage calls. ``reads``/``writes`` are variables of the stage."""

    attribute: str
    first: int
    last: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    random: bool
    recomputed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ContextCall:
    """A function of the context that the runs ``readers`` need. ``constants``: (argument, key) of those it takes.

    ``random``: it takes the random stream as its last argument.
    """

    function: str
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    writes: tuple[str, ...]
    readers: tuple[str, ...]
    random: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """What a virtual stage receives and sends, as variables of the stage."""

    first: int
    last: int
    receives: tuple[str, ...]
    sends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the machines that a program runs on: ``devices`` at most. ``host``: they are its processors, no accelerators."""

    devices: int
    host: bool = False


COMMON = Machine(8)


@dataclass(frozen=True, slots=True)
class Argument:
    """A batch input, and what the stages call it."""

    given: BatchInput
    variable: str


@dataclass(frozen=True)
class Program:
    """The whole program. ``loss``: the stage's variable of the loss; ``weight``: the context function of the weights.

    ``initialization``: recipe by parameter key; ``idle``: shapes of the parameters that no block holds, by key;
    ``untrained``: the stages that make no gradient of a tied parameter that they hold, by key; ``ungathered``: the blocks that
    cannot have ZeRO 3; ``sent``: whole type and placement of each variable that crosses a cut.
    """

    plan: Plan
    model: str
    classes: tuple[BlockClass, ...]
    context: tuple[Function, ...]
    calls: tuple[ContextCall, ...]
    weight: ContextCall
    chain: tuple[Link, ...]
    runs: tuple[Run, ...]
    cuts: tuple[Cut, ...]
    batch: tuple[Argument, ...]
    loss: str
    initialization: Mapping[str, tuple[InitStep, ...]]
    constants: tuple[Buffer, ...]
    idle: Mapping[str, tuple[int, ...]]
    undecayed: tuple[str, ...]
    tied: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    untrained: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ungathered: tuple[int, ...] = ()
    sent: Mapping[str, Variable] = field(default_factory=dict)

    @property
    def random(self) -> bool:
        """Whether anything in it draws at random."""
        return any(run.random for run in self.runs) or any(call.random for call in (*self.calls, self.weight))


__all__ = [
    "HALF", "BlockClass", "Compute", "ContextCall", "Convert", "Cut", "Declaration", "Dtype", "Function", "Link",
    "LocalArgument", "Program", "RankSize", "Repeat", "Run", "Statement", "Variable",
]
