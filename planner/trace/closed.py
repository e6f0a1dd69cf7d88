"""Code that is closed: what it computes depends on its module, its arguments and constants alone, and it changes nothing else.

Two calls of closed code on equal modules with equal arguments do the same. Whether code is closed is read from its bytecode,
and refused in doubt: it may load globals only where those are torch, ``math``, constants, plain built-in functions or
functions that are closed themselves, and may store nowhere but in its own variables. torch's own code is taken to be closed.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import torch

Read = tuple[Callable[[], object], object]

_TORCH = str(Path(torch.__file__).parent)
_PLAIN = frozenset({
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
    "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "zip",
})
"""Built-in functions that read nothing but their arguments."""

_STORES = frozenset({"STORE_SUBSCR", "STORE_SLICE", "STORE_DEREF"})
_NAMES = ("LOAD_NAME", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "LOAD_FROM_DICT", "LOAD_CLASSDEREF")
_REGIONS = frozenset({"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast"})
"""Regions that an export cuts out of its graph."""

_ELSEWHERE = frozenset({"__init__"})
"""What no closed forward runs. (It can ask for the module's text, ``f"{self}"``, without a name that would tell.)"""

_SAID = frozenset({
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__constants__", "__parameters__", "__orig_bases__",
    "__type_params__", "__static_attributes__",
})
"""What a class says of itself."""

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_constant(value: object) -> bool:
    """Whether a value can never change."""
    return all(map(is_constant, value)) if type(value) is tuple else type(value) in _VALUES


def is_torch_function(value: object) -> bool:
    """Whether a value is one of torch's (or ``math``'s) own functions."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_TORCH) and not value.__closure__
    if not isinstance(value, BuiltinFunctionType):
        return False
    owner = value.__self__
    if owner is None:
        return value.__module__ == "torch"
    return isinstance(owner, ModuleType) and (owner is math or owner.__name__.startswith("torch."))


def is_torch_class(kind: type) -> bool:
    """Whether a class is one of torch's own modules."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__.startswith("torch.nn.modules.") and file.startswith(_TORCH)


class ClosedCode:
    """Tells of module classes whether their code is closed, and still reads what it read when that was found out."""

    def __init__(self) -> None:
        self._reads: dict[type, list[Read] | None] = {}

    def holds(self, kind: type) -> bool:
        if kind not in self._reads:
            scan = _Scan(kind)
            self._reads[kind] = scan.reads if scan.closed() else None
        reads = self._reads[kind]
        return reads is not None and all(read() is value for read, value in reads)


class _Scan:
    """Reads the code of a module class and of its bases, torch's left out. ``reads``: what the code depends on beside its
    arguments, as functions that look it up and what they found."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.reads: list[Read] = []
        self.seen: set[FunctionType] = set()

    def closed(self) -> bool:
        return all(map(self._class, (base for base in self.kind.__mro__ if base is not object and not is_torch_class(base))))

    def _class(self, base: type) -> bool:
        table = vars(base)
        self._note(partial(len, table))
        return type(base) is type and all(self._member(name, self._note(partial(table.get, name))) for name in table)

    def _member(self, name: str, value: object) -> bool:
        """Whether an attribute of a class is closed code or a constant."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        return name in _ELSEWHERE or all(
            self._function(part) if isinstance(part, FunctionType) else name in _SAID or is_constant(part) for part in parts
        )

    def _note(self, read: Callable[[], object]) -> object:
        value = read()
        self.reads.append((read, value))
        return value

    def _function(self, function: FunctionType) -> bool:
        if function in self.seen:
            return True
        self.seen.add(function)
        code = function.__code__
        self._note(partial(getattr, function, "__code__"))
        keywords = function.__kwdefaults__ or {}
        reads = [partial(getattr, function, "__defaults__"), *(partial(keywords.get, name) for name in keywords)]
        if not all(is_constant(self._note(read)) for read in reads):
            return False
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                captured = self._note(partial(getattr, cell, "cell_contents"))
            except ValueError:  # it holds nothing yet
                return False
            if name != "__class__" and not self._allowed(captured):  # that one is for super()
                return False
        return all(self._code(part, function) for part in _codes(code))

    def _code(self, code: CodeType, function: FunctionType) -> bool:
        instructions = tuple(dis.get_instructions(code))
        loaded = Counter(each.argval for each in instructions if each.opname in ("LOAD_DEREF", "LOAD_GLOBAL"))
        return loaded["__class__"] <= loaded["super"] and _stores_locally(code, instructions) and all(
            self._loads(instruction, function) for instruction in instructions if instruction.opname.startswith("LOAD_")
        )

    def _loads(self, instruction: dis.Instruction, function: FunctionType) -> bool:
        """Whether what is loaded is closed."""
        opname, name = instruction.opname, instruction.argval
        if opname.startswith(_NAMES):
            return False
        if "ATTR" in opname or "METHOD" in opname:
            return not name.startswith("__") and name not in _REGIONS
        if opname != "LOAD_GLOBAL":
            return True
        found = self._note(partial(function.__globals__.get, name, builtins))
        if found is not builtins:
            return name not in _REGIONS and self._allowed(found)
        value = vars(builtins).get(name)
        return name in _PLAIN or (inspect.isclass(value) and issubclass(value, BaseException))

    def _allowed(self, value: object) -> bool:
        if isinstance(value, ModuleType):
            return value is math or value is torch or value.__name__.startswith("torch.")
        if inspect.isclass(value):
            return is_torch_class(value) or value in (torch.Tensor, int, float, bool, str)
        if isinstance(value, FunctionType) and not is_torch_function(value):
            return self._function(value)
        return is_constant(value) or is_torch_function(value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _stores_locally(code: CodeType, instructions: Iterable[dis.Instruction]) -> bool:
    """Whether nothing is imported, and nothing stored but in variables and in parts of what these hold."""
    for instruction in instructions:
        name = instruction.opname
        if name.startswith("IMPORT") or (name == "STORE_DEREF" and instruction.argval in code.co_freevars):
            return False
        if name.startswith(("STORE_", "DELETE_")) and name not in _STORES and "_FAST" not in name:
            return False
    return True
