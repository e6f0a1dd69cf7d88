"""YAML as all readers of files take it: safe, and a field that is written twice is refused, not taken as its last value.

What people write (jobs, clusters) is read as YAML 1.2's core schema has it; what is dumped as PyYAML dumps it (plans), by
YAML 1.1: a fingerprint such as 12345e67 is no number there, and is not put in quotes. :func:`dump` is for both readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is written twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_WORDS: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: json.loads(text.lower())),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", lambda text: int(text, _base(text))),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789",
        lambda text: float(re.sub(r"\.(?=[inIN])", "", text)),
    ),
    "merge": (r"<<", "<", lambda text: text),
}
"""Plain scalars that are no text, by their tag: form, first characters, value (YAML 1.2.2, section 10.3.2)."""


def _base(text: str) -> int:
    return {"0o": 8, "0x": 16}.get(text[:2], 10)


class _CoreLoader(_Loader):
    """YAML 1.2's core schema: no octal 010, sixty-based 1:30 or `no` for false, and 1e-4 is a number."""


_CoreLoader.yaml_implicit_resolvers = {}  # Those of YAML 1.1 are not inherited.


def _constructor(made: Callable[[str], object]) -> Callable[[_CoreLoader, yaml.ScalarNode], object]:
    return lambda loader, node: made(loader.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe one; text that is something else by the core schema is put in quotes too."""


for _name, (_form, _first, _made) in _WORDS.items():
    _tag = f"tag:yaml.org,2002:{_name}"
    for _reader in (_CoreLoader, _Dumper):
        _reader.add_implicit_resolver(_tag, re.compile(f"^(?:{_form})$"), [*_first, *([""] if _name == "null" else [])])
    if _name != "merge":
        _CoreLoader.add_constructor(_tag, _constructor(_made))


def load(text: str) -> Any:
    """What a YAML text of our own holds; nothing in it is run. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def load_core(text: str) -> Any:
    """What a YAML text that somebody wrote holds, by YAML 1.2's core schema. Raises as :func:`load`; ValueError for a number
    of too many digits."""
    return yaml.load(text, _CoreLoader)


def dump(content: object, **style: Any) -> str:
    """``content`` as a text that both :func:`load` and :func:`load_core` read so. ``style``: as yaml.dump takes it."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, **style))


class NotYaml(ValueError):
    """One line that says why a text is no YAML. ``line``: the text of the line at fault, empty where none is known."""

    def __init__(self, wrong: str, line: str = "") -> None:
        super().__init__(wrong)
        self.line = line


def parse_mapping(text: str, load: Callable[[str], object] = load) -> dict[str, Any]:
    """The mapping that a YAML text holds. Raises ValueError saying, in one line, what it is instead; NotYaml, which is one,
    where it is none."""
    try:
        data = load(text)
    except yaml.MarkedYAMLError as error:
        why, mark = error.problem or error.context, error.problem_mark
        if mark is None:
            raise NotYaml(f"is not YAML ({why})") from None
        line = "".join(text.splitlines()[mark.line : mark.line + 1])  # The mark may lie behind the last.
        raise NotYaml(f"is not YAML at line {mark.line + 1} ({why})", line) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotYaml(f"is not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(data, dict):
        raise ValueError("holds no mapping")
    return data
