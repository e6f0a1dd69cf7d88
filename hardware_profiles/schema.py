"""The YAML form of a profile: strict, nothing unknown. Every number carries its unit, kind and source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Kind = Literal["datasheet", "measured", "fitted", "given"]
"""``given``: by whoever wrote a file of changes, without saying where it is from."""
Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8", "float4"]


MOST_DEVICES = 2**24
"""Of a level, a node or a host: more are a slip of the pen, and what a cluster gives of each is looked for number by number."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Quantity(_Strict):
    """One number: ``kind`` says how it came to be, ``source`` where to check it."""

    value: Annotated[float, Field(ge=0)]
    unit: str
    kind: Kind
    source: Annotated[str, Field(min_length=3)]

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            raise PydanticCustomError("quantity", "write fields such as {value: 60, unit: GiB, kind: datasheet, source: ...}")
        return given


class CurveDocument(_Strict):
    """See :class:`hardware_profiles.chip.EfficiencyCurve`."""

    maximum: Quantity
    half_work: Quantity
    half_dim: Quantity
    tile: Quantity


class ChipDocument(_Strict):
    """See :class:`hardware_profiles.chip.Chip`."""

    name: Annotated[str, Field(min_length=1)]
    runs_torch: bool = True
    memory: Quantity
    memory_bandwidth: Quantity
    training_dtype: Literal["bfloat16", "float16", "float32", "float64"]
    peak: Annotated[dict[Dtype, Quantity], Field(min_length=1)]
    gemm: Annotated[dict[Dtype, CurveDocument], Field(min_length=1)]
    attention_forward: Quantity
    attention_backward: Quantity
    attention_portable: Quantity | None = None
    memory_efficiency: Quantity
    memory_half: Quantity
    memory_irregular: Quantity | None = None
    launch: Quantity
    reserve: Quantity
    attention_half_head: Quantity | None = None
    attention_tile: Quantity | None = None
    hook: Quantity | None = None
    host: Quantity | None = None
    functions: dict[str, Quantity] = {}


class LinkDocument(_Strict):
    """See :class:`hardware_profiles.cluster.Level`. ``size`` None: the whole cluster; no ``peer_bandwidth``: a switch, which
    gives one peer the whole bandwidth. One of ``start`` and ``half_message``: bytes on the wire of one call that take as long
    as its start, at which it so reaches half of its rate."""

    technology: Annotated[str, Field(min_length=1)]
    size: Annotated[int, Field(ge=1, le=MOST_DEVICES)] | None
    bandwidth: Quantity
    peer_bandwidth: Quantity | None = None
    latency: Quantity
    efficiency: Quantity
    half_message: Quantity | None = None
    start: Quantity | None = None
    send: Quantity | None = None
    torus: bool = False
    reduce_scatter: Literal["ring", "all_reduce"] = "ring"


class ProfileDocument(_Strict):
    """A whole profile. ``links`` in any order: a level lies inside those of more devices. ``nodes`` only in a resolved
    cluster. ``host_devices`` None: a node is one host."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    devices_per_node: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    host_devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)] | None = None
    nodes: Annotated[int, Field(ge=1)] | None = None
    chip: ChipDocument
    links: Annotated[dict[str, LinkDocument], Field(min_length=1)]
