"""Turn text files into a token file that an emitted program's ``--data`` takes: every byte is a token, vocabulary 256.

    python examples/prepare_text.py -o text.tokens book.txt more/*.txt

The format is one line of JSON, then the tokens as little-endian uint16. Files are joined in the order given, with a
zero byte after each; the same files give the same bytes.
"""

from __future__ import annotations

import argparse
import array
import json
import sys
from collections.abc import Sequence
from pathlib import Path

VOCABULARY = 256


def tokens_of(files: Sequence[Path]) -> array.array[int]:
    """The bytes of all files, each followed by a zero, as 16-bit integers."""
    tokens = array.array("H")
    for file in files:
        tokens.extend(file.read_bytes())
        tokens.append(0)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def main() -> None:
    """Read the arguments, write the file, say what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    missing = [str(file) for file in arguments.files if not file.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    if arguments.output.exists() and any(file.samefile(arguments.output) for file in arguments.files):
        parser.error(f"-o {arguments.output} is one of the files, and would be written over: give another path")
    tokens = tokens_of(arguments.files)
    header = {
        "format": "shardwright-tokens", "version": 1, "dtype": "uint16", "vocabulary": VOCABULARY,
        "tokens": len(tokens),
    }
    with arguments.output.open("wb") as output:
        output.write(json.dumps(header).encode() + b"\n")
        tokens.tofile(output)
    print(f"{arguments.output}: {len(tokens)} tokens from {len(arguments.files)} files, vocabulary {VOCABULARY}")


if __name__ == "__main__":
    main()
