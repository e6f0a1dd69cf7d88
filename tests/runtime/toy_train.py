"""The toy as ``torchrun`` starts it: its plan in the environment variable TOY as JSON, a program's arguments."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime import launch
from runtime.loop import train
from tests.runtime.toy_program import Toy, build


def main() -> None:
    """Build the toy and train it."""
    options = launch.parse_options()
    train(build(Toy(**json.loads(os.environ["TOY"]))), options)


if __name__ == "__main__":
    launch.main_guard(main)
