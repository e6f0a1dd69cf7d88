"""Repeated modules are traced once, and the graph is byte for byte what tracing all of them yields."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.ir.errors import ModelError
from planner.ir.serialize import to_json
from planner.trace import load_model, repeats, trace_model
from planner.trace.source import ModelSource
from tests.matrix import models
from tests.matrix.test_hugging_face import CONFIGS
from tests.wide import wide

pytestmark = pytest.mark.slow

export = import_module("planner.trace.export")
ModelFile = Callable[[str], str]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call that was like an earlier one was drawn out from it, in the last export with repeats."""
    told: list[bool] = []
    again, once = repeats._again, export.repeats_as_one

    def begun(*arguments: Any, only: frozenset[str] | None = None, **keywords: Any) -> Any:
        if only is None:
            told.clear()
        return once(*arguments, only=only, **keywords)

    def counted(*arguments: Any, graph: bool = True) -> object:
        outputs = again(*arguments, graph=graph)
        told.extend([outputs is not None] if graph else [])
        return outputs

    monkeypatch.setattr(repeats, "_again", counted)
    monkeypatch.setattr(export, "repeats_as_one", begun)
    return told


def same(source: Callable[[], ModelSource], dtype: str = "float32") -> str:
    """The graph as JSON, traced with repeats and without."""
    graphs = [to_json(trace_model(source(), dtype=dtype, repeats=repeats)) for repeats in (True, False)]
    assert graphs[0] == graphs[1], "a repeated module was drawn out as something else than what it is"
    return graphs[0]


@pytest.mark.parametrize(("name", "settings"), [
    ("gpt", {}), ("gpt", {"bias": False, "tied": False, "gelu": "none"}), ("gpt", {"dropout": 0.1}),
    ("llama", {}), ("llama", {"tied": True, "head_dim": 24}),
])
@pytest.mark.parametrize("dtype", ["float32", wide("bfloat16")])
def test_examples(drawn: list[bool], name: str, settings: dict[str, object], dtype: str) -> None:
    settings = {"layers": 7, "seq": 16} | settings
    same(lambda: load_model(f"{EXAMPLES / name}.py:{name}", settings, None), dtype)
    assert drawn == [True] * 6


def test_torch_sees_the_tensors_of_the_first_layer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    exported = torch.export.export

    def counted(step: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        seen.append(len(list(step.parameters())))
        return exported(step, *arguments, **keywords)

    monkeypatch.setattr(torch.export, "export", counted)
    for layers in (4, 9):
        source = load_model(f"{EXAMPLES / 'gpt.py'}:gpt", {"layers": layers, "seq": 16}, None)
        trace_model(source, dtype="float32")
    assert len(seen) == 2 and seen[0] == seen[1], "parameters of later layers were exported, or a model twice"


ZOO = {
    name: value for name, value in vars(models).items()
    if callable(value) and not isinstance(value, type) and value.__module__ == models.__name__ and name[0] != "_"
}


@pytest.mark.parametrize("name", [wide(name) if at % 3 else name for at, name in enumerate(ZOO)])
def test_every_model_of_the_matrix(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(repeats, "LEAST", 2)
    length = 24 if name in ("hollow", "mixing", "named", "sideways", "stamped", "turned") else 20  # They know so many places.
    same(lambda: ModelSource(name, ZOO[name], None, None, name, length))


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face(monkeypatch: pytest.MonkeyPatch, config_file: Callable[..., str], name: str) -> None:
    monkeypatch.setattr(repeats, "LEAST", 2)
    spec = config_file(**CONFIGS[name])
    same(lambda: load_model(spec, {}, 16))


LAYER = """
        self.a, self.b, self.s = nn.Linear(16, 24), nn.Linear(24, 16), 0.5
        {state}
    def forward(self, x):
        {forward}
        return x + self.b(F.gelu(self.a(x))) * self.s
"""
MODEL = """
COUNT, LISTED, SCALE = [0], [], 1.0

def helper(x):
    return torch.tanh(x) * SCALE

class Layer(nn.Module):
    step = 0
    {shared}
    def __init__(self, i):
        super().__init__()
{layer}
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(48, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer(i) for i in range(6))
        self.last = None
        {built}
    def forward(self, input_ids):
        global SCALE
        x = self.e(input_ids)
        for i, layer in enumerate(self.layers):
            {loop}
        return x @ self.e.weight.T

def make():
    return M()
"""


def model(
    state: str = "pass", forward: str = "pass", built: str = "pass", loop: str = "x = layer(x)", shared: str = "pass"
) -> str:
    return MODEL.format(layer=LAYER.format(state=state, forward=forward), built=built, loop=loop, shared=shared)


ALL: list[bool] = [True] * 5
NONE: list[bool] = []
AT_FIRST = "Layer.step *= i > 0; x = layer(x)"
"""Each pass counts anew."""


@pytest.mark.parametrize(("changes", "expected"), [
    # What the parent does with its layers runs as it is.
    ({}, ALL),
    ({"loop": "x = layer(x) * (i + 1)"}, ALL),
    ({"loop": "x = layer(x if i % 2 else x + 1)"}, ALL),
    ({"loop": "x = layer(x) + x * (1.0 / len(self.layers))"}, ALL),
    ({"loop": "x = x + self.layers[len(self.layers) - 1 - i](x)"}, ALL),
    ({"loop": "self.last = x if i == 3 else self.last; x = layer(x)\n        x = x + self.last"}, ALL),
    ({"loop": "y = layer(x); y += x; x = y"}, [False] * 5),
    ({"loop": "x = layer(x=x)"}, ALL),
    ({"loop": "x = layer(x)", "built": "self.layers[2].a.weight.requires_grad_(False)"}, [True] * 4),
    ({"built": "self.layers[2].a = self.layers[4].a"}, ALL),
    ({"built": "self.layers[2].b.weight = nn.Parameter(self.layers[2].a.weight.detach().T.clone())"}, [True] * 4),
    ({"built": "self.layers.append(nn.Sequential(self.layers[0], self.o))"}, ALL),
    ({"built": "self.again = nn.ModuleList(self.layers[i] for i in (5, 4, 3, 2, 1))",
      "loop": "x = layer(x)\n        for layer in self.again:\n            x = layer(x)"}, ALL),
    ({"forward": "x = helper(x)"}, ALL),
    ({"forward": "x = x + torch.arange(16, device=x.device)"}, ALL),
    ({"forward": "x = F.dropout(x, 0.1, self.training)"}, ALL),
    ({"state": "self.register_buffer('m', torch.arange(16.0) + i)", "forward": "x = x * self.m"}, ALL),
    ({"state": "self.act = F.silu", "forward": "x = self.act(x)"}, ALL),
    # Tensors of later layers, which torch does not see, are read elsewhere, or by nobody.
    ({"loop": "x = layer(x) + self.layers[3].a.bias[:16]"}, ALL),
    ({"loop": "x = layer(x) * self.layers[5].b.weight.mean()"}, ALL),
    ({"loop": "x = layer(x) + self.layers[-1].m", "state": "self.register_buffer('m', torch.arange(16.0) * i)"}, ALL),
    ({"loop": "x = layer(x) + self.layers[-1].m", "state": "self.m = torch.arange(16.0)"}, NONE),
    ({"loop": "x = layer(x) + sum(p.square().sum() for p in self.parameters() if i == 5)"}, ALL),
    ({"loop": "x = layer(x) if i < 4 else x"}, [True] * 3),
    ({"loop": "x = x * 2"}, NONE),
    ({"loop": "try: x = layer(x) if i < 3 else layer(x=x)\n            except Exception: x = x * 2"}, None),
    ({"loop": "x = layer(x) + (F.linear(x, self.layers[4].a.weight) @ self.layers[4].b.weight.T if i == 1 else 0)"}, ALL),
    ({"loop": "x = layer(x) + torch.tensor([0.5] * 16)"}, ALL),
    ({"loop": "x = layer(x)\n        self.layers[2].a.weight.data"}, ALL),
    wide({"loop": "x = layer(x); x = x.clone(); x.mul_(2.0)"}, None),
    ({"loop": "x = layer(x) if i != 2 else layer(x)"}, ALL),
    ({"built": "self.o.weight = self.layers[2].p = nn.Parameter(torch.ones(16, 16))", "loop": "x = self.o(layer(x))"},
     [True] * 4),
    ({"built": "self.o.weight = self.layers[2].a.weight = nn.Parameter(torch.ones(24, 16)); self.o.bias = None",
      "loop": "x = layer(x) + self.o(x)[..., :16]"}, ALL),
    # What differs between layers, or could, is traced for each.
    ({"state": "self.i = i", "forward": "x = x * (self.i + 1)"}, NONE),
    ({"state": "self.s = 1.0 if i else 1"}, [True] * 4),
    ({"state": "self.s = -0.0 if i % 2 else 0.0"}, [True] * 4),
    ({"state": "self.c = nn.Linear(16, 16 if i % 2 else 24)"}, [True] * 4),
    ({"state": "self.d = nn.Dropout(0.1 * i)", "forward": "x = self.d(x)"}, NONE),
    ({"state": "self.b = self.b if i < 3 else nn.Linear(24, 16, bias=False)"}, [True] * 4),
    ({"built": "self.layers[3].a.weight = self.layers[3].b.weight = nn.Parameter(torch.zeros(16, 16));"
               " self.layers[3].b.bias = None; self.layers[3].a.bias = None"}, [True] * 4),
    ({"built": "self.layers[1].eval()", "forward": "x = F.dropout(x, 0.1, self.training)"}, [True] * 4),
    ({"built": "self.layers[1].a.register_forward_hook(lambda m, i, o: o * 2)"}, [True] * 4),
    ({"built": "self.layers[1].forward = lambda x: x * 3"}, [True] * 4),
    ({"built": "self.layers[1].a.forward = lambda x: F.linear(x * 3, self.layers[1].a.weight)"}, [True] * 4),
    ({"loop": "layer.s = 1.0 / (i + 1); x = layer(x)"}, NONE),
    ({"loop": "x = x * 1; x.hint = i; x = layer(x)", "forward": "x = x * (1 + getattr(x, 'hint', 0))"}, NONE),
    wide({"loop": "x = x * 1; x.hint = i; x = layer(x)", "forward": "x = x * (1 + x.hint)"}, NONE),
    ({"loop": "layer.a.bias, x = None if i == 3 else layer.a.bias, layer(x)"}, None),
    ({"loop": "SCALE = SCALE / 2 if i else 1.0; x = layer(x)", "forward": "x = helper(x)"}, NONE),
    ({"loop": "Layer.step = Layer.step + 1 if i else 1; x = layer(x)", "forward": "x = x * self.step"}, NONE),
    ({"forward": "COUNT[0] += 1; x = x * COUNT[0]", "loop": "COUNT[0] *= i > 0; x = layer(x)"}, NONE),
    ({"forward": "self.step += 1; x = x * self.step", "loop": "layer.step = i; x = layer(x)"}, NONE),
    ({"shared": "seen = []", "forward": "self.seen.append(0); x = x * len(self.seen)",
      "loop": "i or layer.seen.clear(); x = layer(x)"}, NONE),
    ({"forward": "type(self).step += 1; x = x * self.step", "loop": AT_FIRST}, NONE),
    ({"forward": "Layer.step = Layer.step + 1; x = x * Layer.step", "loop": AT_FIRST}, NONE),
    wide({"forward": "setattr(Layer, 'step', Layer.step + 1); x = x * Layer.step", "loop": AT_FIRST}, NONE),
    ({"forward": "LISTED.append(x)", "loop": "x = layer(x)\n        x = x + sum(LISTED); LISTED.clear()"}, NONE),
    ({"forward": "import random; x = x * random.Random(len(COUNT)).random()"}, NONE),
    ({"state": "self.seen = []", "forward": "self.seen.append(0); x = x * len(self.seen)"}, NONE),
    ({"forward": "x = x * self.a.__dict__['in_features']"}, NONE),
    ({"loop": "x = layer(layer(x))"}, ALL),
    ({"loop": "x = self.layers[i % 2](x)"}, [True]),
    ({"loop": "x = layer.b(F.gelu(layer.a(x)))"}, NONE),
    ({"loop": "x = layer.forward(x)"}, None),
    wide({"loop": "x = torch.func.functional_call(layer, {'a.weight': self.layers[0].a.weight}, (x,))"}, None),
    ({"loop": "x = torch.func.functional_call(layer, {'a.weight': self.o.weight.repeat(2, 1)[:24] * i}, (x,))"}, None),
    # What an export cuts out, changes or keeps by value is traced as ever.
    ({"forward": "with torch.no_grad():\n            x = x * x.abs().mean(-1, keepdim=True)"}, NONE),
    ({"loop": "with torch.no_grad():\n                y = layer(x)\n            x = x + y"}, NONE),
    ({"forward": "x = x * torch.tensor([0.5] * 16)"}, [False] * 5),
    ({"forward": "x = x.clone(); x.mul_(2.0)"}, [False] * 5),
    wide({"forward": "x = x.clone(); x[:, 0] = 1.0"}, [False] * 5),
    wide({"forward": "x += 1.0"}, [False] * 5),
    ({"forward": "x = F.relu(x, inplace=True)"}, [False] * 5),
    ({"forward": "x[:, 0] = 1.0"}, [False] * 5),
    wide({"forward": "x.view(-1).mul_(2.0)"}, [False] * 5),
    ({"loop": "x = layer(x); x.mul_(2.0)"}, None),
    ({"forward": "y = x * 2\n        return x\n        x = y"}, None),
    ({"forward": "return x.view(-1, 16).view(x.shape)"}, None),
])
def test_models(drawn: list[bool], model_file: ModelFile, changes: dict[str, str], expected: list[bool] | None) -> None:
    spec = model_file(model(**changes))
    same(lambda: load_model(spec, {}, 16))
    assert expected is None or drawn == expected


@pytest.mark.parametrize("changes", [
    {"loop": "SCALE = SCALE / 2; x = layer(x)", "forward": "x = helper(x)"}, {"forward": "COUNT[0] += 1; x = x * COUNT[0]"},
    {"forward": "self.step += 1; x = x * self.step"}, {"forward": "type(self).step += 1; x = x * self.step"},
    {"shared": "seen = []", "forward": "self.seen.append(0); x = x * len(self.seen)"},
])
def test_what_layers_count_over_all_passes_is_refused(model_file: ModelFile, changes: dict[str, str]) -> None:
    for once in (True, False):
        with pytest.raises(ModelError, match="is computed from how often forward has run"):
            trace_model(load_model(model_file(model(**changes)), {}, 16), dtype="float32", repeats=once)


@pytest.mark.parametrize("loop", [
    "self.layers[-1].m.add_(1.0); x = layer(x)", wide("self.layers[-1].m.copy_(x.detach().mean((0, 1))); x = layer(x)"),
    "x = layer(x); self.layers[-1].m[0] = 3.0", "self.layers[-1].m = x.detach().mean((0, 1)); x = layer(x)",
])
def test_what_changes_a_hidden_buffer_is_refused(model_file: ModelFile, loop: str) -> None:
    """As it is where torch sees the buffer: no change of one is lost with it."""
    spec = model_file(model(state="self.register_buffer('m', torch.arange(16.0) * i)", loop=loop))
    for once in (True, False):
        with pytest.raises(ModelError, match=r"buffer layers\.5\.m"):
            trace_model(load_model(spec, {}, 16), dtype="float32", repeats=once)


TUPLES = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, pair, scale=1.0, *, mask=None):
        x, y = pair
        x = x + self.p(y) * scale
        return x, (torch.sigmoid(self.q(x)) if mask is None else self.q(x) * mask)

class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(5))
    def forward(self, x):
        for n in self.n[:3]:
            x = n(x)
        x = self.n[3](x)
        return self.n[4](x)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.f = nn.ModuleList(Inner() for _ in range(12))
        self.t = Torch()
        self.s = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)))
    def forward(self, input_ids):
        x = self.e(input_ids)
        y, mask = x, (input_ids > 3).unsqueeze(-1)
        for f in self.f[:4]:
            x, y = f((x, y))
        for f in self.f[4:8]:
            x, y = f((x, y), 0.5)
        for f in self.f[8:]:
            x, y = f((y, x), mask=mask)
        return self.s(self.t(x + y)) @ self.e.weight.T

def make():
    return M()
"""


def test_tuples_keywords_and_torchs_own_layers(drawn: list[bool], model_file: ModelFile) -> None:
    spec = model_file(TUPLES)
    same(lambda: load_model(spec, {}, 16))
    assert drawn == [True] * (2 + 3 + 3 + 2 + 4), "calls of one value twice, of others, or from other lines are not alike"


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[nn.Module] = []

    def make() -> nn.Module:
        built.append(models.nameless())
        return built[-1]

    trace_model(ModelSource("m", make, None, None, "m", 20), dtype="float32")
    assert len(built) == 1 and not any("forward" in vars(module) for module in built[0].modules())
