"""The tables beside a program: JSON that it reads before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ProgramError
from .launch import say


def read_table(file: Path, *fields: str) -> dict[str, dict[str, Any]]:
    """What the file tells of each name: objects that have the ``fields``.

    Where it is missing or is no such table the process ends as :func:`runtime.launch.main_guard` has it end, which has not
    been called yet.
    """
    table, wrong = None, "is damaged"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        wrong = "is missing"
    except (OSError, ValueError, RecursionError):
        pass
    if isinstance(table, dict) and all(isinstance(entry, dict) and set(fields) <= set(entry) for entry in table.values()):
        return table
    error = ProgramError(str(file), wrong, "emit the program again")
    say(error)
    raise SystemExit(error.exit_code)
