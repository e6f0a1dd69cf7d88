"""The recorded initialisation is the model's own: replayed in order it gives the very weights of a CPU build."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from planner.ir.errors import ModelError
from planner.ir.graph import InitStep, Parameter
from planner.trace import load_model, trace_model
from planner.trace.build import BuiltModel, build
from planner.trace.recipes import replay
from planner.trace.source import ModelSource
from runtime.initialize import initial_value

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 48, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 48,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 3}


def assert_replays(source: ModelSource) -> None:
    """Walk the generator through every draw of the construction; where it is of parameters, follow the recipe of each."""
    built: BuiltModel = build(source, "float32")
    owners: dict[int, list[str]] = {}
    for fqn, drawn in built.drawn.items():
        owners.setdefault(drawn, []).append(fqn)
    parameters = {parameter.fqn: parameter for parameter in built.parameters}
    torch.manual_seed(7)
    replayed = {}
    for index, draw in enumerate(built.draws):
        before = torch.get_rng_state()
        for fqn in owners.get(index, ()):
            torch.set_rng_state(before)
            replayed[fqn] = replay(parameters[fqn].init, torch.empty(draw.shape, dtype=draw.dtype))
        if index not in owners:
            replay((InitStep(draw.op, draw.arguments),), torch.empty(draw.shape, dtype=draw.dtype))
    for fqn, parameter in parameters.items():
        if fqn not in replayed:
            replayed[fqn] = replay(parameter.init, torch.empty(parameter.type.sizes(1)))
    torch.manual_seed(7)
    for fqn, tensor in source.build().named_parameters():
        assert torch.equal(tensor, replayed[fqn]), fqn


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_examples(name: str) -> None:
    assert_replays(load_model(f"{EXAMPLES / name}.py:{name}", {"hidden": 32, "layers": 2}, 16))


@pytest.mark.parametrize("values", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_hugging_face(config_file: Callable[..., str], values: dict[str, object]) -> None:
    assert_replays(load_model(config_file(**values), {}, 16))


MANY_KINDS = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.default = nn.Linear(8, 8)
        self.scaled = nn.Parameter(torch.randn(4, 6) * 0.02 + 1)
        self.shrunk = nn.Parameter(torch.rand(4, 6) / 4)
        self.truncated = nn.Parameter(torch.empty(9, 9))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.padded = nn.Embedding(10, 4, padding_idx=2)
        self.xavier = nn.Linear(4, 4)
        nn.init.xavier_uniform_(self.xavier.weight, gain=1.5)
        self.xavier.bias.data.fill_(0.25)
        self.copied = nn.Parameter(torch.zeros(4, 6))
        with torch.no_grad():
            self.copied.copy_(torch.full((4, 6), 3.0))
        self.table = nn.Parameter(torch.arange(6.0) ** 2)
        self.updated = nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Tanh())

def make():
    return M()
"""


def test_many_kinds(model_file: Callable[[str], str]) -> None:
    source = load_model(model_file(MANY_KINDS), {}, None)
    assert_replays(source)
    kinds = {p.fqn: tuple(step.op for step in p.init) for p in build(source, "float32").parameters}
    assert kinds["scaled"] == ("normal", "scale", "shift")
    assert kinds["truncated"] == ("trunc_normal",)
    assert kinds["padded.weight"] == ("normal", "zero_row")
    assert kinds["table"] == ("value",)
    assert kinds["updated.parametrizations.weight.original"] == ("uniform",)


def test_memory_that_is_used_again_has_no_history(model_file: Callable[[str], str]) -> None:
    """What is made of a list, or shared with NumPy, is made by no operation, and may lie where a draw lay that is gone, or what
    was not computed for real."""
    source = load_model(model_file("""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(600, 600)
        for at in range(20):
            torch.randn(16) * 0.02, torch.empty(16), torch.empty(16).copy_(self.w.weight[0, :16])
            table = [float(at + i) for i in range(16)]
            setattr(self, f"listed_{at}", nn.Parameter(torch.tensor(table)))
            raw = torch.tensor(table).numpy().tobytes()
            setattr(self, f"shared_{at}", nn.Parameter(torch.frombuffer(raw, dtype=torch.float32)))

def make():
    return M()
"""), {}, None)
    assert_replays(source)


@pytest.mark.parametrize(("line", "said"), [
    ("nn.init.orthogonal_(self.w)", "the initialisation of parameter w uses"),
    ("pass", "parameter w is never initialised"),
    ("nn.init.normal_(self.w[:2])", "normal_ on a part of it"),
    ("nn.init.trunc_normal_(self.w[:2])", "_ on a part of it"),
    ("self.w.data[1:] = torch.ones(299, 300) * torch.arange(300)", "copy_ on a part of it"),
])
def test_unrecorded(model_file: Callable[[str], str], line: str, said: str) -> None:
    source = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(300, 300))
        {line}

def make():
    return M()
"""
    with pytest.raises(ModelError, match=said):
        build(load_model(model_file(source), {}, None), "float32")


def test_what_is_filled_part_by_part_is_kept_by_value(model_file: Callable[[str], str]) -> None:
    """Once nothing of an empty tensor is left unwritten, whatever wrote it."""
    source = load_model(model_file("""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.arange(6.0)[:, None] / torch.arange(1, 5)
        table = torch.empty(6, 8)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.table = nn.Parameter(table)
        self.turned = nn.Parameter(table.T.clone() * 2)
        self.rows = nn.Parameter(angles.new_empty(4, 3))
        with torch.no_grad():
            for at, row in enumerate(self.rows):
                row.fill_(at)
        self.part = nn.Parameter(torch.empty(4, 3))
        self.part.data[:2], self.part.data[2:] = torch.randn(2, 3), 1.0
        self.cut = nn.Parameter(torch.ones(4, 3))
        nn.init.trunc_normal_(self.cut[:2], std=0.02)

def make():
    return M()
"""), {}, None)
    built, plain = build(source, "float32"), dict(source.build().named_parameters())
    assert {parameter.fqn: parameter.init[0].op for parameter in built.parameters} == dict.fromkeys(plain, "value")
    assert built.frozen == ("part", "cut")
    for parameter in built.parameters:
        start = replay(parameter.init, torch.empty(parameter.type.sizes(1)))
        part = start[2:] if parameter.fqn in built.frozen else start
        assert parameter.fqn != "cut" or 0 < start[:2].abs().max() < 0.2
        assert torch.equal(part, plain[parameter.fqn][-len(part):]), parameter.fqn


def test_an_empty_tensor_too_large_to_be_real(model_file: Callable[[str], str]) -> None:
    """The message says what is kept by value at that size, and it is."""
    source = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.empty(600, 500)
        table[::2], table[1::2] = torch.arange(500).sin(), torch.arange(500).cos()
        self.table = nn.Parameter(table)

def make():
    return M()
"""
    with pytest.raises(ModelError, match=r"table uses copy_ on a part of it; begin with torch.zeros where torch.empty is"):
        build(load_model(model_file(source), {}, None), "float32")
    assert_replays(load_model(model_file(source.replace("empty", "zeros")), {}, None))


def test_a_draw_that_is_kept_by_value_is_told(model_file: Callable[[str], str]) -> None:
    """A table that was computed is the model's own at any seed; one draw of a random start is not."""
    source = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.w = nn.Embedding(48, 16), nn.Parameter(torch.empty(16, 16))
        self.t = nn.Parameter(torch.arange(16.0) ** 2)
        nn.init.orthogonal_(self.w)

    def forward(self, input_ids):
        return (self.e(input_ids) @ self.w + self.t) @ self.e.weight.T

def make():
    return M()
"""
    graph = trace_model(load_model(model_file(source), {}, None), sequence=8, dtype="float32")
    assert {p.fqn for p in graph.parameters if p.init[0].op == "value"} == {"w", "t"}
    (warning,) = graph.warnings
    assert warning.startswith("parameter w starts from one draw kept by value, whatever the seed")


@pytest.mark.slow
@pytest.mark.parametrize(("made", "read", "named"), [
    ("self.register_buffer('w0', self.a.weight.detach().clone())", "self.w0", "w0"),
    ("self.w0 = self.a.weight.detach() * 2", "self.w0", "w0"),
    ("from torch.nn.utils import prune; prune.l1_unstructured(self.a, 'weight', 0.5)", "0", "a.weight_mask"),
    ("self.register_buffer('w0', torch.zeros_like(self.a.weight))", "self.w0", ""),
    ("self.register_buffer('w0', self.a.weight.detach().clone()); nn.init.normal_(self.w0)", "self.w0", ""),
    ("self.register_buffer('w0', self.a.weight.detach().clone()); nn.init.normal_(self.a.weight)", "self.w0", ""),
    ("nn.init.orthogonal_(self.a.weight); self.register_buffer('w0', self.a.weight.detach().clone())", "self.w0", ""),
    ("self.register_buffer('w0', self.a.weight.detach().clone())", "0", ""),
])
def test_what_was_computed_from_a_start_is_told(model_file: Callable[[str], str], made: str, read: str, named: str) -> None:
    """A program has the start of its own seed, and the buffer that was made of the planner's, where something reads it."""
    source = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a = nn.Embedding(48, 16), nn.Linear(16, 16)
        {made}

    def forward(self, input_ids):
        x = self.a(self.e(input_ids))
        return (x + (x @ {read} if {read!r} != "0" else 0)) @ self.e.weight.T

def make():
    return M()
"""
    graph = trace_model(load_model(model_file(source), {}, None), sequence=8, dtype="float32")
    said = [warning for warning in graph.warnings if "kept as it was computed from the start of parameter a.weight" in warning]
    assert [warning.partition(" ")[0] for warning in said] == ([named] if named else [])


def test_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build(load_model(f"{EXAMPLES / 'gpt.py'}:gpt", {"hidden": 32, "layers": 1}, 16), "float32")
    assert torch.equal(before, torch.get_rng_state())


COPIES = {
    "frozen": "self.t = copy.deepcopy(self.a).requires_grad_(False)",
    "clones": "self.t = nn.ModuleList(copy.deepcopy(self.a) for _ in range(2))",
    "written": "self.t = nn.Linear(8, 8); self.t.weight.data.copy_(self.a.weight); self.t.bias.data.copy_(self.a.bias)",
    "loaded": "self.t = nn.Linear(8, 8); self.t.load_state_dict(self.a.state_dict())",
    "flat": "self.t = nn.Parameter(self.a.weight.detach().view(-1).clone())",
    "changed alike": "self.a.weight.data.mul_(2); self.t = copy.deepcopy(self.a); self.b.weight.data.copy_(self.t.weight)",
    "drawn anew": "self.t = copy.deepcopy(self.a); nn.init.normal_(self.a.weight)",
    "changed": "self.t = copy.deepcopy(self.a); self.a.weight.data.mul_(2); self.b.weight.data.copy_(self.t.weight)",
    "turned": "self.t = nn.Parameter(self.a.weight.detach().t().clone()); self.u = copy.deepcopy(self.t)",
    "parts": "self.t, self.u = map(nn.Parameter, torch.randn(16, 8).chunk(2)); self.v = copy.deepcopy(self.u)",
    "cloned parts": "self.t, self.u = (nn.Parameter(part.clone()) for part in torch.randn(16, 8).chunk(2))",
    "by value": "nn.init.orthogonal_(self.a.weight); self.t = copy.deepcopy(self.a)",
    "a part by value": "self.t = copy.deepcopy(self.a); nn.init.orthogonal_(self.a.weight); self.u = copy.deepcopy(self.t)",
    "constant": "self.a = nn.LayerNorm(8); self.t = copy.deepcopy(self.a)",
}


@pytest.mark.parametrize("line", COPIES.values(), ids=COPIES)
def test_copies_start_equal(model_file: Callable[[str], str], line: str) -> None:
    """Of every two parameters the program's starts are equal just where the plain model's are, at any seed."""
    source = load_model(model_file(f"""
import copy

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        {line}

def make():
    return M()
"""), {}, None)
    parameters = build(source, "float32").parameters
    plain = {fqn: parameter.flatten() for fqn, parameter in source.build().named_parameters()}
    start = {p.fqn: started(p, seed=3).flatten() for p in parameters}
    assert plain.keys() == start.keys()
    for one, other in itertools.combinations(plain, 2):
        assert torch.equal(start[one], start[other]) == torch.equal(plain[one], plain[other]), (one, other)
    other_seed = {p.fqn: started(p, seed=4).flatten() for p in parameters if p.init[-1].op in ("normal", "uniform")}
    assert not any(torch.equal(start[fqn], value) for fqn, value in other_seed.items())


def test_a_scaled_copy_starts_as_a_scaled_copy(model_file: Callable[[str], str]) -> None:
    source = load_model(model_file("""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.t = nn.Parameter(self.a.weight.detach() * 0.5, requires_grad=False)

def make():
    return M()
"""), {}, None)
    start = {p.fqn: started(p, seed=3) for p in build(source, "float32").parameters}
    assert torch.equal(start["t"], start["a.weight"] * 0.5)


def started(parameter: Parameter, seed: int) -> torch.Tensor:
    """What a program begins with."""
    steps = [(step.op, *step.arguments) for step in parameter.init]
    return initial_value(parameter.fqn, parameter.type.sizes(1), torch.float32, steps, seed)
