"""What commands read: files and pipes, no devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hardware_profiles.files import text_of


def test_a_file_and_a_pipe_are_read_whole(tmp_path: Path) -> None:
    """The shell's <(command) is a pipe of the form /dev/fd/63."""
    (tmp_path / "file").write_text("über", encoding="utf-8")
    end, begin = os.pipe()
    os.write(begin, b"row_id\n1\n")
    os.close(begin)
    try:
        assert text_of(Path(f"/dev/fd/{end}")) == "row_id\n1\n"
    finally:
        os.close(end)
    assert text_of(tmp_path / "file") == "über"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(b"\xef\xbb\xbflayers,hidden\r\n12,768\r\n")
    assert text_of(tmp_path / "runs.csv") == "layers,hidden\n12,768\n"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    with pytest.raises(OSError, match="it is a device, not a file"):
        text_of(Path(device))
