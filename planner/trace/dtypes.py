"""torch's dtypes by the names that graphs have for them."""

from __future__ import annotations

import torch


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
