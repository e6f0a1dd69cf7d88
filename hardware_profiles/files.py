"""Files as all commands read them: whole, as text."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def text_of(path: Path) -> str:
    """The text of a file or of a pipe. Raises OSError and UnicodeDecodeError; OSError for a device too, which may have no end
    (/dev/zero would be read until memory is gone). The byte order mark that Windows begins a text with is none of it."""
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
    return path.read_text(encoding="utf-8-sig")
