"""Block classes, the chain's table and the stage class as Python text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from codegen.functions import WIDTH, render_function, wrap
from codegen.naming import escaped, quoted
from codegen.program import BlockClass, ContextCall, Declaration, Link, Program, Run

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
"""What ``range`` counts: other digits, and zeros before them, are names like any other."""


def indented(lines: Sequence[str], by: int = 4) -> list[str]:
    """The lines, further to the right."""
    return [" " * by + line if line else line for line in lines]


def render_class(cls: BlockClass, tensor: int) -> str:
    """A block class: docstring, paths, declarations, recomputed regions, forward."""
    lines = [f"class {cls.name}(ParallelBlock):", *_docstring(cls.doc), ""]
    recomputes = "all" if cls.recomputed else "attention" if cls.regions else ""
    if recomputes:
        lines += [f'    recomputes = "{recomputes}"']
    paths = ", ".join(quoted(item.path) for item in (*cls.parameters, *cls.constants))
    count = len(cls.parameters) + len(cls.constants)
    lines += wrap(f"paths = ({paths}{',' if count == 1 else ''})", 4)
    lines += ["", "    def __init__(self, name, tensor, bindings, constants):",
              "        super().__init__(name, tensor, bindings, constants)"]
    for item in cls.parameters:
        lines += wrap(_declare(item, tensor), 8)
    lines += [f"        self.constant({quoted(item.path)}, bindings[{quoted(item.path)}])" for item in cls.constants]
    for function in (*cls.regions, cls.forward):
        lines += ["", *indented(render_function(function, method=True))]
    return "\n".join(lines)


def _docstring(doc: Sequence[str]) -> list[str]:
    lines = [f'    """{escaped(doc[0])}', *(f"    {escaped(line)}" for line in doc[1:])]
    lines[-1] += '"""'
    return lines


def _declare(item: Declaration, tensor: int) -> str:
    shape = ", ".join(map(str, item.type.shape))
    parts = [quoted(item.path), f"({shape},)" if len(item.type.shape) == 1 else f"({shape})"]
    placement = item.placement
    if tensor > 1 and placement.state == "shard":
        parts.append(f"shard={placement.dim}")
        if placement.segments:
            parts.append(f"segments={placement.segments}")
        if placement.unit != 1:
            parts.append(f"unit={placement.unit}")
    if tensor > 1 and placement.state == "shared":
        parts.append("partial_gradient=True")
    if not item.trainable:
        parts.append("trainable=False")
    return f"self.declare({', '.join(parts)})"


def render_chain(program: Program) -> str:
    """The table of blocks: (name, class, keys)."""
    other = any(link.bindings for link in program.chain)
    lines = [f"CHAIN = [  # name, class, prefix of its state keys{', and what another key holds' if other else ''}"]
    at = 0
    while at < len(program.chain):
        link = program.chain[at]
        count = _numbered(program.chain, at)
        if count > 1:
            stem, number = link.name.rsplit(".", 1)
            numbers = f"{int(number)}, {int(number) + count}" if int(number) else f"{count}"
            begin = escaped(stem).replace("{", "{{").replace("}", "}}")
            name, own = f'f"{begin}.{{i}}"', f'f"{begin}.{{i}}."'
            prefix = own if link.prefix == f"{link.name}." else quoted(link.prefix)
            lines += _entry(f"*(({name}, {link.cls}, ", prefix, link, f") for i in range({numbers})),")
        else:
            lines += _entry(f"({quoted(link.name)}, {link.cls}, ", quoted(link.prefix), link, "),")
        at += count
    lines.append("]")
    legend = "shape of one micro-batch, dtype, dim split over the tensor axis, whether a gradient returns"
    lines.append(f"CROSSING = {{  # {legend}" if program.sent else "CROSSING = {}")
    for name, variable in program.sent.items():
        sizes = variable.type.sizes(program.plan.batch.micro)
        dim = variable.placement.dim if variable.placement.state == "shard" and program.plan.mesh.tensor > 1 else None
        lines.append(f'    "{name}": ({sizes}, torch.{variable.type.dtype}, {dim}, {variable.differentiable}),')
    if program.sent:
        lines.append("}")
    lines += wrap(f"SHARED = {dictionary(program.tied)}", 0) + wrap(f"ALIASES = {dictionary(program.aliases)}", 0)
    return "\n".join(lines)


def render_made_for(program: Program) -> str:
    """What of the numbers at the top of ``train.py`` the model's text depends on."""
    plan = program.plan
    parts = [f'precision="{plan.precision}"', f"tensor={plan.mesh.tensor}"]
    if len(program.cuts) > 1:
        parts += [f"micro={plan.batch.micro}", f"cuts=({', '.join(str(cut.first) for cut in program.cuts)})"]
    if program.ungathered:
        parts.append(f"ungathered={program.ungathered}")
    return "\n".join(wrap(f"MADE_FOR = MadeFor({', '.join(parts)})", 0))


def dictionary(table: object) -> str:
    """A table of texts or numbers by key."""
    items = [f"{quoted(k)}: {quoted(v) if isinstance(v, str) else v}" for k, v in table.items()]  # type: ignore[attr-defined]
    return f"{{{', '.join(items)}}}"


def _entry(begin: str, prefix: str, link: Link, end: str) -> list[str]:
    """One entry of the chain: its keys are a prefix, or that and what is kept under others."""
    if not link.bindings:
        return wrap(f"{begin}{prefix}{end}", 4)
    items = [f"{quoted(path)}: {quoted(fqn)}" for path, fqn in link.bindings]
    whole = f"    {begin}({prefix}, {{{', '.join(items)}}}){end}"
    if len(whole) <= WIDTH:
        return [whole]
    return [f"    {begin}({prefix}, {{", *(f"        {item}," for item in items), f"    }}){end}"]


def _numbered(chain: Sequence[Link], at: int) -> int:
    """How many links from ``at`` on are numbered consecutively, of one class, with keys that follow from their names and are
    alike besides."""
    link = chain[at]
    stem, _, number = link.name.rpartition(".")
    if not stem or not _NUMBER.fullmatch(number):
        return 1
    count = 1
    while at + count < len(chain):
        following = chain[at + count]
        name = f"{stem}.{int(number) + count}"
        prefix = f"{name}." if link.prefix == f"{link.name}." else link.prefix
        if following != Link(name, link.cls, prefix, link.bindings):
            break
        count += 1
    return count


def render_stage(program: Program) -> str:
    """The one class of all stages: runs of blocks in loops, a stage that lacks a run has it empty."""
    lines = [
        "class Stage(nn.Module):",
        '    """Blocks first to last (exclusive) of the chain; the last stage returns the loss."""', "",
    ]
    for method in (_stage_init(program), _stage_units(), _stage_forward(program)):
        lines += [*indented(method), ""]
    lines.pop()
    lines += ["", "", *_weigh(program)]
    return "\n".join(lines)


def _stage_init(program: Program) -> list[str]:
    lines = [
        "def __init__(self, first, last, tensor):",
        "    super().__init__()",
        "    self.first, self.last = first, last",
    ]
    table = {cut.first: cut for cut in program.cuts}
    for label in ("receives", "sends"):
        items = ", ".join(
            f"{cut.first}: ({''.join(f'{chr(34)}{n}{chr(34)}, ' for n in getattr(cut, label)).strip()})"
            for cut in table.values()
        )
        lines += wrap(f"self.{label} = {{{items}}}[first]", 4)
    lines += ["    blocks, owners = [], {}"]
    if any(link.bindings for link in program.chain):
        lines += [
            "    for name, cls, keys in CHAIN[first:last]:",
            "        prefix, others = (keys, {}) if isinstance(keys, str) else keys",
            '        keys = {path: f"{prefix}{path}" for path in cls.paths} | others',
        ]
    else:
        lines += [
            "    for name, cls, prefix in CHAIN[first:last]:",
            '        keys = {path: f"{prefix}{path}" for path in cls.paths}',
        ]
    lines += [
        "        block = cls(name, tensor, keys, CONSTANTS)",
        "        for path in block.declarations:",
        "            if keys[path] in owners:",
        "                block.share(path, *owners[keys[path]])",
        "            owners.setdefault(keys[path], (block, path))",
        "        blocks.append(block)",
    ]
    for run in program.runs:
        own = f"max({run.first} - first, 0) : max({run.last} - first, 0)"
        lines.append(f"    self.{run.attribute} = nn.ModuleList(blocks[{own}])")
    return lines


def _stage_units() -> list[str]:
    return [
        "def units(self):",
        '    """Indices of the blocks that are sharded together: those that share a parameter, or one with others that do."""',
        "    units = []",
        "    for index in range(self.first, self.last):",
        "        shared = [set(blocks) for blocks in SHARED.values() if index in blocks]",
        "        tied = [unit for unit in units if any(not blocks.isdisjoint(unit) for blocks in shared)]",
        "        units = [unit for unit in units if unit not in tied]",
        "        units.append(sorted([index, *(member for unit in tied for member in unit)]))",
        "    return sorted(units)",
    ]


def _stage_forward(program: Program) -> list[str]:
    names = [argument.variable for argument in program.batch]
    parameters = ["self", "*received", *names] + (["rng=None"] if program.random else [])
    lines = [f"def forward({', '.join(parameters)}):"]
    lines += _receive(program)
    for call in program.calls:
        lines += _context_call(call, program)
    for run in program.runs:
        lines += _run(run)
    sends = {cut.sends for cut in program.cuts[:-1]}
    if not sends:
        return [*lines, f"    return {program.loss}"]
    lines += [f"    if self.last == {len(program.chain)}:", f"        return {program.loss}"]
    if len(sends) == 1:
        (names_sent,) = sends
        return [*lines, f"    return {', '.join(names_sent)}"]
    every = sorted({name for group in sends for name in group})
    items = ", ".join(f'"{name}": {name}' for name in every)
    return [*lines, *wrap(f"alive = {{{items}}}", 4), "    return tuple(alive[name] for name in self.sends)"]


def _receive(program: Program) -> list[str]:
    groups = {cut.receives for cut in program.cuts[1:]}
    every = tuple(dict.fromkeys(name for cut in program.cuts[1:] for name in cut.receives))
    if not every:
        return []
    if len(groups) == 1:
        left = f"({every[0]},)" if len(every) == 1 else ", ".join(every)
        return ["    if received:", f"        {left} = received"]
    items = ", ".join(f'alive.get("{name}")' for name in every)
    return ["    alive = dict(zip(self.receives, received, strict=True))", *wrap(f"{', '.join(every)} = {items}", 4)]


def _context_call(call: ContextCall, program: Program) -> list[str]:
    anywhere = set(call.readers) >= {run.attribute for run in program.runs}
    text = f"{', '.join(call.writes)} = {call.function}({', '.join(_context_arguments(call, program))})"
    if anywhere:
        return wrap(text, 4)
    return [f"    if {' or '.join(f'self.{name}' for name in call.readers)}:", *wrap(text, 8)]


def _context_arguments(call: ContextCall, program: Program) -> list[str]:
    device = f"{(call.arguments or (program.batch[0].variable,))[0]}.device"
    stream = ["rng"] if call.random else []
    return [*call.arguments, *(f'constant("{key}", {device})' for _, key in call.constants), *stream]


def _run(run: Run) -> list[str]:
    arguments = ", ".join([*run.reads, *(["rng.block(block.name)"] if run.random else [])])
    plain = f"block({arguments})"
    repeated = f"checkpoint(block, {arguments}, use_reentrant=False)"
    left = ", ".join(run.writes)
    lines = [f"    for block in self.{run.attribute}:"]
    if all(run.recomputed):
        return lines + wrap(f"{left} = {repeated}", 8)
    if not any(run.recomputed):
        return lines + wrap(f"{left} = {plain}", 8)
    return [*lines, '        if block.recomputes == "all":', *wrap(f"{left} = {repeated}", 12),
            "        else:", *wrap(f"{left} = {plain}", 12)]


def _weigh(program: Program) -> list[str]:
    given = [argument for argument in program.batch if argument.given.role != "share"]
    call = f"{program.weight.function}({', '.join(_context_arguments(program.weight, program))})"
    said, returned = "Weight of all terms of one micro-batch's loss.", f"({call},)"
    if len(given) < len(program.batch):
        said, returned = "Samples of one micro-batch, and the weights of its loss's averages.", call
    names = [*(argument.variable for argument in given), *(["rng=None"] if program.random else [])]
    return [f"def weigh({', '.join(names)}):", f'    """{said}"""',
            *wrap(f"return {returned}", 4)]
