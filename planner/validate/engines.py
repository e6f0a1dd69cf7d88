"""Which engine ran a row: the packaged engine that behaves so, with the recipes that the row's words ask for."""

from __future__ import annotations

import re

from hardware_profiles import engine_names
from planner.validate.recipes import offload_recipe
from planner.validate.rows import Row

RECIPES = ("nvfp4", "mxfp8", "fp8-cs", "fp8row", "fp8", "float8")
"""Words for products in another precision, the particular before the general."""
ALIKE = {
    "deepspeed": "deepspeed-megatron", "megatron-deepspeed": "deepspeed-megatron", "nemo": "megatron-core",
    "megatron-bridge": "megatron-core", "maxtext": "xla", "paxml": "xla", "jax": "xla", "alpa": "xla", "t5x": "xla",
    "fsdp2": "torchtitan-eager",
    "llm-foundry": "fsdp", "mosaicml": "fsdp", "fms-fsdp": "fsdp-compile",
}  # fmt: skip
"""For engines that have no data of their own, the nearest that has."""


def engine_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """The engine's name (``NAME`` or ``NAME+RECIPE``), and in words what stands for something else."""
    known = engine_names()
    asked = _base(row)
    name = asked if asked in known else ALIKE.get(asked.lower(), _class_of(row))
    if name == "deepspeed-megatron" and row.zero == 3:
        name = "deepspeed-zero3"
    cautions = [] if asked in known else [f"{name} stands for the engine {asked or 'that the row does not say'}"]
    words = row.words["compile_or_fp8"].lower()
    recipes = []
    precision = next((word for word in RECIPES if word in words), None)
    if precision is not None:
        found = next((word for word in (precision, "fp8") if f"{name}+{word}" in known), None)
        recipes += [found] if found else []
        if found is None:
            cautions.append(f"{name} has no recipe for {precision}: predicted without")
    if "asynctp" in words:
        recipes += ["async"] if f"{name}+async" in known else []
    offload = offload_recipe(row, name, narrow=precision is not None)
    if offload is not None:
        recipes.append(offload)
    return "+".join((name, *recipes)), tuple(cautions)


def _class_of(row: Row) -> str:
    """Of an engine that nothing is known of: what trains on a TPU or comes from a source that is called after an engine of XLA,
    what divides tensors or has a pipeline, what compiles, and else torch run operation by operation."""
    named = re.findall(r"[a-z0-9]+", row.words.get("source", "").lower())
    if row.chip.lower().startswith("tpu") or any(ALIKE.get(word) == "xla" for word in named):
        return "xla"
    if (row.tensor or 1) > 1 or (row.pipeline or 1) > 1:
        return "megatron-core"
    return "torchtitan" if "compile" in row.words["compile_or_fp8"] else "torchtitan-eager"


def _base(row: Row) -> str:
    """The engine as the row names it, told apart by its version and its options."""
    notes, words = row.words["notes"], row.words["compile_or_fp8"]
    if row.engine == "torchtitan" and "compile" not in words:
        return "torchtitan-eager"
    if row.engine == "torchtitan" and "_202412_" in row.words.get("source", ""):
        return "torchtitan-2024"
    if words.startswith("xla"):
        return "xla"
    if row.engine != "megatron":
        return row.engine
    if "GPT-NeoX" in notes:
        return "gpt-neox"
    if "DeepSpeed" in row.words["zero_or_fsdp"] or "DeepSpeed" in notes:
        return "deepspeed-zero3" if row.zero == 3 else "deepspeed-megatron"
    if "WITHOUT the scatter/gather" in notes:
        return "megatron-2021-plain-sends"
    return "megatron-2022" if row.words.get("source", "").startswith("Korthikanti2022") else "megatron"
