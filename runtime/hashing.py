"""Seeds that depend on their names alone."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from a tuple of names and numbers, the same on every machine."""
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
