"""What a row's source leaves to a recipe or a default that is published elsewhere: recomputation, and activations that wait in
the host's memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from planner.validate.rows import Row

LATENT: Final = ("DeepSeek", "Kimi")
"""Models that attend over latents, whose ranks no column says."""
HEAD_DIMS: Final = {"Qwen3": 128, "GPT_OSS": 64}
"""Of models whose heads are not the hidden size over their number (``head_dim`` of their configurations: Qwen/Qwen3-30B-A3B,
openai/gpt-oss-120b)."""
OFFLOADED: Final = {
    ("GB200-NVL72", 80, False): "offload20of80", ("GB200-NVL72", 80, True): "offload40of80",
    ("GB300-NVL72", 80, False): "offload30of80", ("GB300-NVL72", 80, True): "offload20of80",
    ("B200-SXM-180GB", 80, True): "offload5of80", ("GB300-NVL72", 126, False): "offload40of126",
    ("B300-SXM-288GB", 126, False): "offload40of126",
}  # fmt: skip
"""``cpu_offloading_num_layers`` of Megatron-Bridge's recipes for Megatron FSDP, by chip, layers and whether products are
narrow (NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes/llama/*/llama3.py and llama31.py)."""


def completed(row: Row) -> Row:
    """The row with what follows from published recipes and defaults; what was taken from them is in its doubts."""
    said, notes = row.recompute, row.words["notes"]
    if said is not None:
        return row
    if re.search(r"recomputes \d+ of \d+ layers fully", notes):
        return replace(row, recompute="full")
    if row.engine == "megatron-core" and row.experts and not row.model.startswith(LATENT):
        doubt = "recompute none: Megatron-Bridge's recipes repeat pointwise work alone (recompute_modules)"
        return replace(row, recompute="none", doubts=(*row.doubts, doubt))
    if "MaxText" in notes or row.engine == "maxtext":
        doubt = "recompute full: MaxText's default (configs/base.yml, remat_policy)"
        return replace(row, recompute="full", doubts=(*row.doubts, doubt))
    return row


def head_dim(row: Row) -> int | None:
    """Of a head, where the row's notes or its model say it; None: the hidden size over the heads."""
    named = re.search(r"head_dim (\d+)", row.words["notes"])
    return int(named[1]) if named else next((size for model, size in HEAD_DIMS.items() if row.model.startswith(model)), None)


def recomputed_layers(row: Row) -> int | None:
    """How many of the first layers recompute, where the row says so; None: all do."""
    named = re.search(r"recomputes (\d+) of \d+ layers fully", row.words["notes"])
    return int(named[1]) if named else None


def offload_recipe(row: Row, engine: str, *, narrow: bool) -> str | None:
    """The engine's recipe for activations in the host's memory; None where all stay on the device."""
    words = row.words["notes"]
    if engine == "xla":
        return "offload" if "offloaded" in words and row.recompute == "full" else None
    if engine == "deepspeed-zero3":
        return "offload" if row.recompute == "full" else None
    if engine == "megatron-core" and "Megatron FSDP" in row.words["zero_or_fsdp"] and row.recompute == "none":
        return OFFLOADED.get((row.chip, row.layers or 0, narrow))
    return None
