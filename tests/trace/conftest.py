"""Models for the tracer's tests, written as a user would into a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

ModelFile = Callable[[str], str]


@pytest.fixture
def model_file(tmp_path: Path) -> ModelFile:
    """Write source to a file; returns the spec of its callable ``make``."""

    def write(source: str) -> str:
        path = tmp_path / "user_model.py"
        header = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
        path.write_text(header + dedent(source))
        return f"{path}:make"

    return write


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., str]:
    """Write a transformers config; returns its spec."""

    def write(**values: object) -> str:
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values))
        return f"hf:{folder}"

    return write
