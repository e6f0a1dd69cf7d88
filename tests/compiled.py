"""Programs' modules, compiled once a process: all but two or three of each are the same runtime."""

from __future__ import annotations

import _imp
import marshal
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any


def compile_once() -> None:
    """Have modules of equal source compiled once, each under its own file's name, as those of Python's own cache are."""
    known: dict[bytes, bytes] = {}
    compiled: Any = SourceFileLoader.source_to_code

    def source_to_code(self: SourceFileLoader, data: bytes, path: str, **options: Any) -> CodeType:
        source = bytes(data)
        if source not in known:
            known[source] = marshal.dumps(compiled(self, data, path, **options))
        code: CodeType = marshal.loads(known[source])
        _imp._fix_co_filename(code, path)
        return code

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[assignment,method-assign]
