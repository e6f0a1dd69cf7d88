"""Engine: how the software that runs a step departs from one kernel an operation and one transfer after another.

Every number is a share, a count or seconds that has a physical meaning, and the same for every model and every cluster;
what belongs to a chip or to a link is in their profiles. ``engines/NAME.yaml`` holds each with unit, kind and source;
``base:`` takes the rest from another engine. ``NAME+RECIPE`` is an engine with one of its ``recipes`` laid over it: products in
another precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.problems import first_problem
from hardware_profiles.reader import merge, parse_yaml
from hardware_profiles.schema import Quantity
from hardware_profiles.units import to_si

AttentionKernel = Literal["flash", "portable", "unfused"]
Bookkeeping = Literal["operations", "fused", "compiled"]
Selective = Literal["attention", "alternate"]
Repeats = Literal["all", "needed"]
Gathers = Literal["blocks", "parameters"]


@dataclass(frozen=True, slots=True)
class Engine:
    """Behaviour of one engine; the defaults are torch run operation by operation, nothing hidden.

    Products: ``matmul_dtype``, the dtype of the layers' products where it is not the job's (the products before the loss
    stay in the job's); ``matmul_speed``, their rate over the chip's for that dtype; ``grouped_speed``, rate of the experts'
    products, which meet uneven numbers of tokens, over that of others; ``cast_passes``, times that the
    activations and gradients which enter them are read and written to get there.
    Attention: ``flash``, the chip's best kernel; ``portable``, one that does not use the chip's newest instructions;
    ``unfused``, products, softmax and dropout as kernels of their own. ``attention_speed``: its rate over the chip's.
    Other work: ``pointwise_traffic``, share of the bytes of memory-bound work that still moves; ``kernels``, share of its
    kernels; ``loss_forward`` and ``loss_backward``, bytes of an element of the logits that cross-entropy moves (0: it reads
    them once and writes their gradient once); ``sums``, share of autograd's sums (of a value's gradients where several
    operations read it) that are kernels of their own; ``host_s``, what the host needs for
    one operation or collective of the graph: a block takes at least that for each.
    Traffic: ``gathers_hidden`` and ``gathers_floor``, overlap of ZeRO's traffic of a micro-batch with its compute
    (cost_models/overlap.py); ``gradients_hidden`` and ``gradients_floor``, of what is reduced once a step with the last
    backward pass; ``collective_speed``, rate of both over the links'; ``gradient``, bytes of one element as it is reduced
    (0: the master's); ``tensor_exposed``, seconds of the tensor axis' collectives that are waited for, over what they take
    alone; ``sends_exposed``, the same of transfers between pipeline ranks; ``sends_blocking``, share of these for which
    both ranks stop; ``sends_scattered``, whether each tensor rank sends its own part of a replicated tensor.
    Around ZeRO's traffic: ``gather_copies``, times that gathered parameters are read or written besides being cast;
    ``reduce_copies``, the same of reduced gradients of a group of one.
    Optimizer: ``accumulation``, share of the passes that add a micro-batch's gradients to the masters' which are left (0: the
    product that makes a gradient adds it); ``optimizer_passes``, tensors of the masters' size that the update moves;
    ``step_s``, what a step takes beside all that is counted.
    Memory: ``keeps``, what lives from forward to backward (planner/costing/kept.py): ``operations``, what autograd keeps for
    each; ``fused``, what products read and what the pointwise work between them starts from, with gradients in flat buffers
    that are reduced in place and pipeline buffers that are used again; ``compiled``, only what pointwise work starts from;
    ``selective``, what selective recomputation runs again: ``attention``, from the scores to the attended values;
    ``alternate``, all but attention and every other product; ``repeats``, what recomputation runs again of a layer or a region:
    ``all``, or what is ``needed``, up to the last operation that keeps something (torch's checkpoint stops there; JAX drops
    the rest); ``offloaded``, share of what lives from forward to backward that
    waits in the host's memory; ``outputs_kept``, share of what a stage has sent that stays until its backward pass;
    ``held_fp16`` and ``held_bf16``, bytes of an element's gradients until the step where ZeRO does
    not shard them (0: the master's); ``loss``, bytes of an element of the logits at the most, copies and gradient together
    (0: as torch computes it); ``gathers``, what ZeRO 3 gathers at a time (two ``blocks`` or two ``parameters``);
    ``gathered``, elements that it has gathered at the most (0: these two); ``updated_fp16`` and ``reduced_bf16``, what an
    update makes beside all that is held, where ZeRO 1 or 2 divides the moments: bytes of an element of its shard under float16,
    of every element under bfloat16; ``bucket``, elements of the buffer that float16 gradients are reduced from.
    ``sources``: kind and source of each number, by name.
    """

    name: str = "torch-eager"
    attention: AttentionKernel = "flash"
    attention_speed: float = 1.0
    matmul_dtype: str | None = None
    matmul_speed: float = 1.0
    grouped_speed: float = 1.0
    cast_passes: float = 0.0
    pointwise_traffic: float = 1.0
    kernels: float = 1.0
    loss_forward: float = 0.0
    loss_backward: float = 0.0
    sums: float = 0.0
    gather_copies: float = 0.0
    reduce_copies: float = 0.0
    host_s: float = 0.0
    gathers_hidden: float = 0.0
    gathers_floor: float = 1.0
    gradients_hidden: float = 0.0
    gradients_floor: float = 1.0
    collective_speed: float = 1.0
    gradient: int = 0
    tensor_exposed: float = 1.0
    sends_exposed: float = 1.0
    sends_blocking: float = 0.0
    sends_scattered: bool = False
    accumulation: float = 1.0
    optimizer_passes: float = 10.0
    step_s: float = 0.0
    keeps: Bookkeeping = "operations"
    selective: Selective = "attention"
    repeats: Repeats = "needed"
    gathers: Gathers = "blocks"
    offloaded: float = 0.0
    outputs_kept: float = 1.0
    held_fp16: float = 0.0
    held_bf16: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    updated_fp16: float = 0.0
    reduced_bf16: float = 0.0
    bucket: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)


UNITS: Mapping[str, str] = {
    "attention_speed": "ratio", "matmul_speed": "ratio", "grouped_speed": "ratio", "cast_passes": "elements",
    "pointwise_traffic": "ratio", "kernels": "ratio", "loss_forward": "bytes", "loss_backward": "bytes",
    "sums": "ratio", "gather_copies": "elements", "reduce_copies": "elements",
    "host_s": "s", "gathers_hidden": "ratio", "gathers_floor": "ratio",
    "gradients_hidden": "ratio",
    "gradients_floor": "ratio", "collective_speed": "ratio", "gradient": "bytes", "tensor_exposed": "ratio",
    "sends_exposed": "ratio", "sends_blocking": "ratio", "accumulation": "ratio", "optimizer_passes": "elements", "step_s": "s",
    "held_fp16": "bytes", "held_bf16": "bytes", "loss": "bytes", "gathered": "elements",
    "offloaded": "ratio", "outputs_kept": "ratio", "updated_fp16": "bytes", "reduced_bf16": "bytes", "bucket": "elements",
}  # fmt: skip
"""Dimension of each number of an engine."""
_SHARES = {
    "gathers_hidden", "gathers_floor", "gradients_hidden", "gradients_floor", "sends_blocking", "offloaded", "outputs_kept",
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RecipeDocument(_Strict):
    """Products in another precision: what it changes."""

    matmul_dtype: Literal["float8", "float4"] | None = None
    numbers: dict[str, Quantity] = {}


class EngineDocument(_Strict):
    """See :class:`Engine`. ``numbers``: by the names of its fields."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    attention: AttentionKernel = "flash"
    keeps: Bookkeeping = "operations"
    selective: Selective = "attention"
    repeats: Repeats = "needed"
    gathers: Gathers = "blocks"
    sends_scattered: bool = False
    numbers: dict[str, Quantity] = {}
    recipes: dict[str, RecipeDocument] = {}


def engine_names() -> tuple[str, ...]:
    """The engines that come with the package, sorted, each followed by its recipes. Recipes combine: ``NAME+ONE+OTHER``."""
    names = sorted(_bases())
    return tuple(full for name in names for full in (name, *(f"{name}+{recipe}" for recipe in _document(name).recipes)))


def _bases() -> set[str]:
    """The engines without their recipes."""
    folder = resources.files("hardware_profiles") / "engines"
    return {entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")}


@lru_cache(maxsize=256)
def engine(name: str) -> Engine:
    """The engine called ``name`` (or ``NAME+RECIPE``). An unknown one raises :class:`ProfileFormatError`, listing the known."""
    base, *recipes = name.split("+")
    if base not in _bases() or not _document(base).recipes.keys() >= set(recipes):
        raise ProfileFormatError("engine", f"unknown engine {name!r}", f"use one of {', '.join(engine_names())}")
    document = _document(base)
    numbers = dict(document.numbers)
    matmul_dtype = None
    for recipe in recipes:
        numbers |= document.recipes[recipe].numbers
        matmul_dtype = document.recipes[recipe].matmul_dtype or matmul_dtype
    values: dict[str, Any] = {number: _si(number, quantity, name) for number, quantity in numbers.items()}
    if "gradient" in values:
        values["gradient"] = round(values["gradient"])
    sources = {number: f"{quantity.kind}: {quantity.source}" for number, quantity in numbers.items()}
    return Engine(
        name=name, attention=document.attention, keeps=document.keeps, matmul_dtype=matmul_dtype,
        sends_scattered=document.sends_scattered, selective=document.selective, repeats=document.repeats,
        gathers=document.gathers, sources=sources, **values,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def origin(name: str, number: str) -> str | None:
    """Which document (``NAME``) or recipe (``NAME+RECIPE``) gives an engine this number; None: its default."""
    base, *recipes = name.split("+")
    documents = list(_documents(base))
    for recipe in reversed(recipes):
        for called, content in documents:
            if number in content.get("recipes", {}).get(recipe, {}).get("numbers", {}):
                return f"{called}+{recipe}"
    return next((called for called, content in documents if number in content.get("numbers", {})), None)


def _documents(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A document as it is written, then those that it is based on."""
    content = parse_yaml(engine_text(name), name)
    yield name, content
    if "base" in content:
        yield from _documents(content["base"])


@lru_cache(maxsize=256)
def fitted_numbers(subject: str) -> dict[str, float]:
    """The numbers of kind ``fitted`` that a document or a recipe (as :func:`origin` names it) states itself, in SI."""
    base, _, recipe = subject.partition("+")
    content = parse_yaml(engine_text(base), base)
    stated = content["recipes"][recipe]["numbers"] if recipe else content.get("numbers", {})
    quantities = {number: Quantity.model_validate(_numbers(value)) for number, value in stated.items()}
    return {number: _si(number, q, subject) for number, q in quantities.items() if q.kind == "fitted"}


def forget() -> None:
    """Read the files again at the next question: a fit has rewritten them."""
    for known in (engine, origin, fitted_numbers, _document):
        known.cache_clear()


def engine_text(name: str) -> str:
    """YAML of a packaged engine."""
    return (resources.files("hardware_profiles") / "engines" / f"{name}.yaml").read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def _document(name: str) -> EngineDocument:
    try:
        document = EngineDocument.model_validate(_numbers(_content(name)))
    except ValidationError as error:
        field, wrong, right = first_problem(error)
        raise ProfileFormatError(f"{name}: {field}", wrong, f"{right} (see hardware_profiles/engine.py)") from error
    for path, quantity in _quantities(document):
        _si(path, quantity, name)
    return document


def _content(name: str) -> dict[str, Any]:
    content = parse_yaml(engine_text(name), name)
    if "base" not in content:
        return content
    base = content.pop("base")
    return merge(_content(base), content)


def _numbers(content: Any) -> Any:
    """YAML's ``80`` is an integer; a quantity's value is a float."""
    if not isinstance(content, Mapping):
        return content
    return {k: float(v) if k == "value" and type(v) is int else _numbers(v) for k, v in content.items()}


def _quantities(document: EngineDocument) -> Iterator[tuple[str, Quantity]]:
    yield from document.numbers.items()
    for recipe in document.recipes.values():
        yield from recipe.numbers.items()


def _si(name: str, quantity: Quantity, where: str) -> float:
    if name not in UNITS:
        known = ", ".join(f.name for f in fields(Engine) if f.name in UNITS)
        raise ProfileFormatError(f"{where}: {name}", "is no number of an engine", f"use one of {known}")
    value = to_si(quantity.value, quantity.unit, UNITS[name], f"{where}: {name}")
    if name in _SHARES and value > 1:
        raise ProfileFormatError(f"{where}: {name}", f"{value} is above 1", "a share is between 0 and 1")
    return value


DEFAULT_ENGINE = engine("torch-eager")
"""What runs a program that `emit` wrote."""
