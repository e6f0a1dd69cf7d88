"""What code is closed: it computes from its module, its arguments and constants, and stores nothing elsewhere."""

from __future__ import annotations

import textwrap

import pytest

from planner.trace.closed import ClosedCode

SOURCE = """
import functools, itertools, math, random, time
import torch
import torch.nn.functional as F
from torch import Tensor, nn, relu
from math import sqrt

EPSILON, SIZES, TABLE, COUNTER = 1e-6, (1, 2), {{}}, itertools.count()
part = functools.partial(F.softmax, dim=-1)

def plain(x, scale=2.0, *, shift=1):
    return torch.tanh(x) * scale + shift * EPSILON

def remembering(x, seen=[]):
    seen.append(x)
    return x * len(seen)

def counting():
    count = 0
    def count_up(x):
        nonlocal count
        count += 1
        return x * count
    return count_up

def wrapped(function):
    def inner(x):
        return function(x) + 1
    return inner

counted, decorated, disguised = counting(), wrapped(plain), wrapped(remembering)

class Function(torch.autograd.Function):
    pass

class Base(nn.Module):
    {base}

class Layer(Base):
    {members}
    def __init__(self):
        super().__init__()
        self.a = TABLE
    def forward(self, x, mask=None):
        {forward}
        return x
"""

CLOSED = [
    "x = F.gelu(relu(x)) * math.sqrt(2.0) + sqrt(3)",
    "x = plain(x, shift=2)",
    "x = decorated(x)",
    "x = sum(part * 2 for part in x.chunk(2, dim=-1))",
    "b, t, *_ = x.shape\n        x = x.view(b, -1) if mask is None else x.masked_fill(mask, float('-inf'))",
    "f = lambda y: y * EPSILON\n        x = f(x)",
    "def inner(y):\n            return y * t\n        t = len(SIZES)\n        x = inner(x)",
    "if x.shape[0] != 2:\n            raise ValueError(f'{x.shape}')",
    "assert isinstance(x, Tensor)",
    "x, y = self.helper(x), [x, x]\n        y[0] = x",
    "x = super().forward(x)",
    "x = x.to(torch.float32) if x.dtype == torch.bfloat16 else x",
]
OPEN = [
    "total = 0\n        def add(y):\n            nonlocal total\n            total = total + y\n        x = x * total",
    "x = remembering(x)", "x = decorated(x) + disguised(x)", "x = __class__().forward(x)",
    "x = counted(x)", "x = x * next(COUNTER)", "x = part(x)", "x = Function.apply(x)",
    "TABLE['x'] = x", "x = TABLE.get(0, x)", "x = x * random.random()", "x = x * time.time()", "x = x * id(x)",
    "global EPSILON\n        EPSILON = 2.0", "self.x = x", "del self.x", "x.y = 1", "import os", "from os import path",
    "x = x * getattr(self, 'x')", "setattr(self, 'x', x)", "x = eval('x')", "x = x * globals()['EPSILON']",
    "self.__dict__['x'] = x", "x = x * self.__class__.x", "print(x)", "x = x * unknown",
    "with torch.no_grad():\n            x = x + 1", "with torch.autocast('cpu'):\n            x = x + 1",
    "class Inner:\n            pass", "x = Base().forward(x)", "x = x * hash(x)", "x = x * open('file').read()",
    "x = torch.utils.data.__builtins__['eval'](x)",
]


def holds(forward: str, members: str = "pass", base: str = "pass") -> bool:
    if "super()" in forward:
        base = "def forward(self, x):\n        return x * 2"
    if "helper" in forward:
        members = "def helper(self, x):\n        return x * self.training"
    names: dict[str, object] = {"__name__": "user_model"}
    exec(compile(textwrap.dedent(SOURCE.format(forward=forward, members=members, base=base)), "user_model.py", "exec"), names)
    kind = names["Layer"]
    assert isinstance(kind, type)
    return ClosedCode().holds(kind)


@pytest.mark.parametrize("forward", CLOSED)
def test_closed(forward: str) -> None:
    assert holds(forward)


@pytest.mark.parametrize("forward", OPEN)
def test_open(forward: str) -> None:
    assert not holds(forward)


@pytest.mark.parametrize("members", [
    "shared = []", "table = {}", "cached = functools.cached_property(lambda self: 1)",
    "@property\n    def x(self):\n        return next(COUNTER)",
    "def extra_repr(self):\n        return str(next(COUNTER))", "def __repr__(self):\n        return str(next(COUNTER))",
    "@staticmethod\n    def x():\n        return TABLE", "__call__ = part", "def _call_impl(self, *a):\n        TABLE[0] = a",
])
def test_members_and_bases_count(members: str) -> None:
    assert holds("x = x + 1")
    assert not holds("x = x + 1", members=members)
    assert not holds("x = x + 1", base=members)


@pytest.mark.parametrize("change", [
    "names['EPSILON'] = 2.0", "names['plain'] = abs", "kind.step = 2", "kind.forward = lambda self, x: x", "kind.more = 1",
    "names['plain'].__code__ = (lambda x, scale=2.0, *, shift=1: x).__code__", "names['plain'].__defaults__ = (3.0,)",
    "names['plain'].__kwdefaults__['shift'] = 5", "names['len'] = abs",
])
def test_what_changes_holds_no_more(change: str) -> None:
    names: dict[str, object] = {"__name__": "user_model"}
    exec(SOURCE.format(forward="x = plain(x) * self.step * len(x.shape)", members="step = 1", base="pass"), names)
    kind, code = names["Layer"], ClosedCode()
    assert isinstance(kind, type) and code.holds(kind)
    exec(change, {"names": names, "kind": kind})
    assert not code.holds(kind)
