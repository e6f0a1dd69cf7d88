"""Readable names: of values from the left-hand sides of the user's lines, of parameters from their paths."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence

from planner.ir.body import Node, Source
from planner.ir.identifiers import as_identifier

WORDS: Mapping[str, str] = {
    "linear": "projected", "mm": "projected", "matmul": "product", "bmm": "product", "add": "total", "sub": "difference",
    "mul": "scaled", "div": "ratio", "layer_norm": "normed", "rms_norm": "normed", "group_norm": "normed",
    "embedding": "embedded", "scaled_dot_product_attention": "attended", "reshape": "reshaped", "transpose": "transposed",
    "permute": "permuted", "contiguous": "packed", "gelu": "activated", "relu": "activated", "silu": "activated",
    "tanh": "activated", "sigmoid": "gate", "softmax": "probabilities", "log_softmax": "log_probabilities",
    "dropout": "dropped", "cat": "joined", "stack": "stacked", "split": "parts", "chunk": "parts", "unbind": "parts",
    "split_with_sizes": "parts", "getitem": "part", "neg": "negated", "pow": "powered", "mean": "average", "sum": "summed",
    "rsqrt": "inverse_root", "sqrt": "root", "to": "cast", "expand": "expanded", "slice": "sliced", "select": "selected",
    "unsqueeze": "widened", "squeeze": "squeezed", "arange": "positions", "conv2d": "convolved", "conv1d": "convolved",
    "randn_like": "noise", "rand_like": "uniform", "randint_like": "numbers", "empty": "like",
    "cross_entropy_loss": "loss", "ne": "counted", "cos": "cosine", "sin": "sine", "t": "transposed",
}
VARIANTS = frozenset({"unsqueeze", "squeeze", "expand", "to", "contiguous"})  # keep the name of what they vary
RESERVED = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | frozenset(
    {"self", "torch", "F", "nn", "tp", "rng", "math", "forward", "checkpoint", "runtime", "True", "False", "None"}
)
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]*)?=(?!=)")


def name_values(
    nodes: Sequence[Node], taken: Iterable[str], preferred: Mapping[str, str], elsewhere: Iterable[Source | None] = ()
) -> dict[str, str]:
    """A readable, unique identifier for every node, none of them in ``taken``; ``preferred`` names come first.

    Lines ``elsewhere`` end in another body: what they assign is not here.

    The last operation of a user's line is named by what the line assigns; parts of a tuple by their own targets; all
    others by what their operation yields.
    """
    used = set(taken) | RESERVED
    wanted = _wanted(nodes, frozenset(elsewhere)) | dict(preferred)
    names: dict[str, str] = {}
    for node in nodes:
        if node.base in VARIANTS and node.name not in wanted and node.operands[0] in wanted:
            wanted[node.name] = wanted[node.operands[0]]
        wish = name = wanted.get(node.name) or _word(node)
        count = 2
        while name in used:
            name, count = f"{wish}_{count}", count + 1
        used.add(name)
        names[node.name] = name
    return names


def _word(node: Node) -> str:
    """What the operation yields, in a word."""
    operand = node.operands[0] if node.operands else ""
    if node.base == "reshape" and operand.startswith("batch:"):
        return f"flat_{operand.removeprefix('batch:')}"
    word = WORDS.get(node.base, node.base.strip("_"))
    return word if word.isidentifier() else "value"


def _wanted(nodes: Sequence[Node], elsewhere: frozenset[Source | None]) -> dict[str, str]:
    """What the user's own lines call their results."""
    depth: dict[Source, int] = {}
    for node in nodes:
        if node.source:
            depth[node.source] = min(_depth(node), depth.get(node.source, _depth(node)))
    wanted: dict[str, str] = {}
    for source, group in itertools.groupby(nodes, key=lambda node: node.source):
        run = tuple(group)
        targets = () if source in elsewhere else assigned(source)
        if len(targets) == 1 and source is not None:
            if _depth(run[-1]) == depth[source] and len(run[-1].types) == 1:
                wanted[run[-1].name] = targets[0]
            continue
        inside = {name for node in run for name in node.operands}
        parts = [node for node in run if node.op == "getitem"]
        results = [node for node in run if node.name not in inside and len(node.types) == 1]
        if parts and len(targets) > 1:
            indices = ((node, dict(node.arguments)["index"]) for node in parts)
            wanted |= {n.name: targets[i] for n, i in indices if isinstance(i, int) and i < len(targets)}
        elif targets and len(results) == len(targets):
            wanted |= {node.name: target for node, target in zip(results, targets, strict=True)}
    return wanted


def _depth(node: Node) -> int:
    return node.module.count(".") + bool(node.module)


def assigned(source: Source | None) -> tuple[str, ...]:
    """Names that a source line assigns to."""
    match = _ASSIGNMENT.match(source.code) if source else None
    return tuple(name.strip() for name in match.group(1).split(",")) if match else ()


def attribute_path(fqn: str, prefix: str) -> str:
    """A dotted path of identifiers for a parameter, relative to its block's module: ``net.0.weight`` -> ``net_0.weight``."""
    relative = fqn.removeprefix(f"{prefix}.") if prefix else fqn
    parts: list[str] = []
    for part in relative.split("."):
        part = as_identifier(part)
        if part.isdecimal() and parts:
            parts[-1] += f"_{part}"
        else:
            parts.append(part)
    return ".".join(map(_identifier, parts))


def unnumbered(path: str) -> str:
    """A path of identifiers without the numbers that they end in: ``scale_3.weight`` -> ``scale.weight``."""
    return ".".join(_identifier(re.sub(r"(?<=.)_\d+$", "", part)) for part in path.split("."))


def _identifier(part: str) -> str:
    return part if part.isidentifier() and part not in RESERVED else f"_{part}"


def unique_path(path: str, taken: Iterable[str]) -> str:
    """The path, with underscores until it is no other's path and lies neither inside nor around another."""
    others = tuple(taken)
    while any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in others):
        path += "_"
    return path
